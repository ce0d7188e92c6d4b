"""The cluster as etcd's keys tell it. Pure: keys and values in, changes of members out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.records import decode, name_in, over
from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import MemberId
from moonpool.core.membership import Liveness, MemberChange

_ORDER = list(Liveness)  # a life goes from left to right only


@dataclass(frozen=True, slots=True)
class Item:
    """One key as of ``revision``; ``value`` is None where it was deleted."""

    key: bytes
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Record:
    """``revision``: of the key that says it; 0 where etcd has no such key (any more)."""

    change: MemberChange
    revision: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """``change`` is to be written over the record of ``revision``; ``lapsed``: only while there is no beat."""

    change: MemberChange
    revision: int
    lapsed: bool


class Book:
    """``refused`` counts values that were no records. ``seen``: the newest revision told."""

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        self._records: dict[MemberId, Record] = {}
        self._beating: set[MemberId] = set()
        self._told: set[MemberId] = set()  # those whose record has been handed out
        self._contested: set[MemberId] = set()  # an emptied etcd forgot that this life is over, and it said it lives
        self._floor = 0  # everything up to here was in the last restart
        self.seen = 0
        self.refused = 0

    def record(self, member: MemberId) -> Record | None:
        return self._records.get(member)

    def beats(self, member: MemberId) -> bool:
        return member in self._beating

    def verdicts(self) -> list[Verdict]:
        """What should be said of those said to live whose lease is gone, and of lives that came back."""
        said = []
        for member, (known, revision) in ((m, (r.change, r.revision)) for m, r in self._records.items()):
            if member in self._contested:
                said.append(Verdict(known, revision, lapsed=False))
            elif known.liveness is Liveness.LIVE and member not in self._beating:
                proof = "its lease lapsed" if revision else "unknown to the registry"
                said.append(Verdict(over(known.member, Liveness.SILENT, proof), revision, lapsed=True))
        return said

    def restart(self, items: Sequence[Item], revision: int) -> list[MemberChange]:
        """Everything under the prefix as of ``revision``, which may be of an emptier etcd than the one before.

        What is missing stays known; whoever lived is a suspect then. One that nobody was told of and that has no beat is
        kept back until it has been judged or beats again.
        """
        self._beating = {m for item in items if (m := name_in(item.key, self._address.beats)) is not None}
        found = {m: item for item in items if (m := name_in(item.key, self._address.lives)) is not None}
        self._contested.clear()
        for member, known in self._records.items():
            if member not in found:
                self._records[member] = Record(known.change, 0)
        changes = [change for member, item in found.items() for change in self._take(member, item)]
        self._floor = self.seen = revision
        return changes

    def event(self, item: Item) -> list[MemberChange]:
        """One change of a key. What a ``restart`` has told already says nothing."""
        if item.revision <= self._floor:
            return []
        self.seen = max(self.seen, item.revision)
        beating = name_in(item.key, self._address.beats)
        if beating is not None:
            (self._beating.discard if item.value is None else self._beating.add)(beating)
            return self._tell_kept_back(beating)
        member = name_in(item.key, self._address.lives)
        return [] if member is None else self._take(member, item)

    def _take(self, member: MemberId, item: Item) -> list[MemberChange]:
        known = self._records.get(member)
        self._contested.discard(member)
        if item.value is None:
            if known:
                self._records[member] = Record(known.change, 0)
            return []
        try:
            change = decode(member, item.value)
        except InvalidRequest:
            self.refused += 1
            return []
        if known and _goes_back(known.change, change):
            self._records[member] = Record(known.change, item.revision)
            self._contested.add(member)
            return []
        self._records[member] = Record(change, item.revision)
        if change.liveness is Liveness.LIVE and member not in self._beating and member not in self._told:
            return []
        return self._tell(known, change)

    def _tell_kept_back(self, member: MemberId) -> list[MemberChange]:
        record = self._records.get(member)
        if record is None or member in self._told or member not in self._beating:
            return []
        return self._tell(None, record.change)

    def _tell(self, known: Record | None, change: MemberChange) -> list[MemberChange]:
        member = change.member
        first = member.id not in self._told
        self._told.add(member.id)
        if first or known is None:
            return [change]
        older = known.change
        if older.member.incarnation < member.incarnation and older.liveness is not Liveness.GONE:
            return [over(older.member, Liveness.GONE, f"replaced by life {member.incarnation}"), change]
        return [] if older == change else [change]


def _goes_back(known: MemberChange, said: MemberChange) -> bool:
    if known.member.incarnation != said.member.incarnation:
        return known.member.incarnation > said.member.incarnation
    return _ORDER.index(said.liveness) < _ORDER.index(known.liveness)
