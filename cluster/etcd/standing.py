"""Who leads, as two keys of etcd say it, and what to write to lead. Pure.

``leader`` names a conductor's life and the term; it is there as long as that member's lease is renewed. ``term`` is the newest
one there ever was, of any model. Both are written at once, by comparing, so that of two who try one succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonpool.cluster.election import Lead
from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Item
from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.membership import Member
from moonpool.wire import pb
from moonpool.wire.convert import parse

MAX_BYTES = 256


@dataclass(frozen=True, slots=True)
class Bid:
    """Where every key of ``expected`` is at its revision (0: not there), ``leader`` and ``newest`` are to be written."""

    expected: Mapping[bytes, int]
    leader: bytes
    newest: bytes
    term: int


def stand(address: EtcdAddress, member: Member, known: int, leader: Item | None, newest: Item | None) -> Lead | Bid:
    """Who leads (its lease is left open), or how ``member`` comes to. What is no such thing gives way.

    An older life of ``member`` gives way, too: its key lies under the lease that the newer one goes on renewing.
    """
    said = _leader(leader)
    if said is not None and (said.leader != member.id or said.incarnation == member.incarnation):
        return said
    term = max(known, _number(newest), _term(leader)) + 1
    message = pb.registry.LeadReply(leader=member.id, incarnation=member.incarnation, term=term)
    expected = {address.leader(member.model): leader.revision if leader else 0, address.term: newest.revision if newest else 0}
    return Bid(expected, message.SerializeToString(), str(term).encode(), term)


def _leader(item: Item | None) -> Lead | None:
    if item is None or not item.value or len(item.value) > MAX_BYTES:
        return None
    try:
        said = parse(item.value, pb.registry.LeadReply)
    except InvalidRequest:
        return None
    if not said.leader or not said.term:
        return None
    return Lead(MemberId(said.leader), Incarnation(said.incarnation), said.term, 0.0)


def _term(item: Item | None) -> int:
    said = _leader(item)
    return said.term if said is not None else 0


def _number(item: Item | None) -> int:
    text = item.value if item is not None else None
    return int(text) if text and len(text) <= 19 and text.isdigit() else 0
