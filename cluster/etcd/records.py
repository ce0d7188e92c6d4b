"""What a key's value says, checked: etcd may hold anything, from anyone who may write there."""

from __future__ import annotations

from dataclasses import replace

from moonpool.core.errors import ConfigError, InvalidRequest
from moonpool.core.ids import MemberId, checked_name
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, parse, to_wire

MAX_BYTES = 64 << 10


def encode(change: MemberChange) -> bytes:
    return to_wire(change, pb.types.MemberChange()).SerializeToString()


def decode(name: str, value: bytes) -> MemberChange:
    """The life under key ``name``. InvalidRequest where ``value`` is no such thing."""
    if len(value) > MAX_BYTES:
        raise InvalidRequest(f"{name}: {len(value)} bytes are more than the {MAX_BYTES} of a record", param="value")
    change = from_wire(parse(value, pb.types.MemberChange), MemberChange)
    member = change.member
    try:
        checked_name(member.id, "id")
        checked_name(member.node, "node")
    except ConfigError as e:
        raise InvalidRequest(e.message, param=e.param) from e
    if member.id != name or member.incarnation <= 0 or not member.address:
        raise InvalidRequest(f"{name}: the record is of {member.id!r}, life {member.incarnation}", param="value")
    return change


def over(member: Member, liveness: Liveness, proof: str) -> MemberChange:
    """The end of a life, or its silence."""
    return MemberChange(replace(member, ready=False), liveness, proof)


def name_in(key: bytes, prefix: bytes) -> MemberId | None:
    """The member whose key this is; None for a key of another kind."""
    if not key.startswith(prefix):
        return None
    try:
        return MemberId(checked_name(key[len(prefix) :].decode("ascii"), "key"))
    except (UnicodeDecodeError, ConfigError):
        return None
