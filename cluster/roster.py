"""Who is in the cluster: the registry's state, pure. Facts and ``now`` (seconds, any monotonic clock) in, changes out.

    live ──missed beats, broken stream──> silent ──proof──> gone
      └────────proof, left in order──────────────────────────┘

A life (one incarnation of one member id) never goes back: a silent one that speaks again is fenced and has to come back
as a newer life, because its attempts were moved and its read pins dropped meanwhile. GONE needs proof, since a silent
process may still write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moonpool.cluster.groups import belongs
from moonpool.core.errors import LayoutMismatch
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.core.membership import PROTOCOL, Liveness, Member, MemberChange


class Fenced(Exception):
    """This life is over: a newer one took its name (``replaced``), or it was declared silent or gone."""

    def __init__(self, why: str, *, replaced: bool = False) -> None:
        super().__init__(why)
        self.replaced = replaced


class Roster:
    """``silent_after_s``: a live member without a beat for this long is silent."""

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._known: dict[MemberId, MemberChange] = {}  # the newest life of each id
        self._beats: dict[MemberId, float] = {}  # of live members
        self._swept: float | None = None
        self._forgiven_until = 0.0

    def snapshot(self) -> list[MemberChange]:
        return list(self._known.values())

    def get(self, member: MemberId) -> MemberChange | None:
        return self._known.get(member)

    def join(self, member: Member, now: float) -> list[MemberChange]:
        """A new life, or the same live one with changed words. Fenced, or LayoutMismatch naming both values."""
        known = self._known.get(member.id)
        if known and known.member.incarnation == member.incarnation:
            self.beat(member.id, member.incarnation, now)
        elif known and known.member.incarnation > member.incarnation:
            raise Fenced(f"{member.id}: a newer life ({known.member.incarnation}) took the name", replaced=True)
        require_agreement(member, self._known.values())
        changes = []
        if known and known.member.incarnation < member.incarnation and known.liveness is not Liveness.GONE:
            changes.append(MemberChange(known.member, Liveness.GONE, f"replaced by life {member.incarnation}"))
        changes.append(MemberChange(member, Liveness.LIVE))
        self._known[member.id] = changes[-1]
        self._beats[member.id] = now
        return changes

    def beat(self, member: MemberId, incarnation: Incarnation, now: float) -> None:
        """Fenced unless this life is the newest one and live."""
        known = self._known.get(member)
        if known is None or known.member.incarnation != incarnation:
            raise Fenced(f"{member}: life {incarnation} is not the newest one", replaced=True)
        if known.liveness is not Liveness.LIVE:
            raise Fenced(f"{member}: was declared {known.liveness.value}: {known.proof}")
        self._beats[member] = now

    def broken(self, member: MemberId, incarnation: Incarnation, now: float) -> list[MemberChange]:
        """The session's stream broke: the process died, or the network did.

        Where the registry itself was frozen for long, members have given up sessions that it never read: they come again, or
        miss their beats.
        """
        if self._was_away(now) > self._silent_after_s or now < self._forgiven_until:
            return []
        return self._turn(member, incarnation, Liveness.SILENT, "its session broke")

    def gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> list[MemberChange]:
        return self._turn(member, incarnation, Liveness.GONE, proof)

    def sweep(self, now: float) -> list[MemberChange]:
        """Declares silent whoever missed its beats. To be called several times per ``silent_after_s``.

        A late sweep means that the registry itself was frozen or starved, and beats may be waiting unread: beyond a
        quarter of ``silent_after_s``, time since the last sweep counts against nobody.
        """
        lost = self._was_away(now)
        self._swept = now
        if lost > self._silent_after_s:
            self._forgiven_until = now + self._silent_after_s
        if lost > 0:
            self._beats = {member: last + lost for member, last in self._beats.items()}
        changes = []
        for member, last in list(self._beats.items()):
            if now - last > self._silent_after_s:
                proof = f"no heartbeat for {1000 * (now - last):.0f} ms"
                changes += self._turn(member, self._known[member].member.incarnation, Liveness.SILENT, proof)
        return changes

    def _was_away(self, now: float) -> float:
        """Seconds that count against nobody; not positive where sweeps come as they should."""
        return now - self._swept - self._silent_after_s / 4 if self._swept is not None else 0.0

    def _turn(self, member: MemberId, incarnation: Incarnation, to: Liveness, proof: str) -> list[MemberChange]:
        known = self._known.get(member)
        if known is None or known.member.incarnation != incarnation or known.liveness in (to, Liveness.GONE):
            return []
        self._beats.pop(member, None)
        change = MemberChange(replace(known.member, ready=False), to, proof)
        self._known[member] = change
        return [change]


_WITH_KV = (Role.STORE, Role.PREFILL, Role.DECODE, Role.BOTH)


def require_agreement(member: Member, known: Iterable[MemberChange]) -> None:
    """Equal protocol and hash key as everybody not gone, equal layout as everybody of its model, one model a node.

    Two that differ would misunderstand one another, or never share a block, silently. Versions of the package may differ.
    """
    if member.protocol != PROTOCOL:
        raise LayoutMismatch(_protocols(member.protocol, f"{member.id}{_of(member)}", PROTOCOL, "the registry"))
    for change in known:
        other = change.member
        if change.liveness is Liveness.GONE or other.id == member.id:
            continue
        if member.protocol != other.protocol:
            raise LayoutMismatch(
                _protocols(member.protocol, f"{member.id}{_of(member)}", other.protocol, f"{other.id}{_of(other)}")
            )
        if member.layout and other.layout and belongs(other, member.model):
            member.layout.require_same(other.layout, f"{other.id} ({other.address})")
        if member.hash_key_id and other.hash_key_id and member.hash_key_id != other.hash_key_id:
            raise LayoutMismatch(
                f"hash_key_id differs: {member.hash_key_id!r} at {member.id}, {other.hash_key_id!r} at {other.id}; "
                "start both with the same one"
            )
        _require_one_model(member, other)
        if member.hash_key_id and other.hash_key_id and member.kv_key_id != other.kv_key_id:
            raise LayoutMismatch(
                f"kv key differs: {_kv_key(member)}, {_kv_key(other)}; start both with the same security.kv_encryption "
                "and security.kv_key_file"
            )


def _require_one_model(member: Member, other: Member) -> None:
    """A node's workers share its store node, so all of them are of its model."""
    share = member.node == other.node and member.role in _WITH_KV and other.role in _WITH_KV
    if share and not belongs(other, member.model):
        raise LayoutMismatch(
            f"model differs: {member.model!r} at {member.id}, {other.model!r} at {other.id}, both on node {member.node!r}; "
            "start both with the same one, or give another model on the same host a node id of its own (--node)"
        )


def _protocols(mine: int, me: str, theirs: int, them: str) -> str:
    return (
        f"protocol differs: {mine} at {me}, {theirs} at {them}; run versions of one protocol in a cluster, or stop all of it "
        "before starting the other version"
    )


def _of(member: Member) -> str:
    return f" (moonpool {member.version})" if member.version else ""


def _kv_key(member: Member) -> str:
    return f"{member.kv_key_id or 'none (kv_encryption = off)'} at {member.id}"
