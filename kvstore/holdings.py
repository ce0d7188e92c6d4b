"""Slots and index together: what landings, reservations and tickets all do to a slot.

Every sealed slot has one index entry, findable or withdrawn; a withdrawn one lives until its last pin ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from moonpool.core.errors import Bug, Busy
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import SlotRef
from moonpool.kvstore.index import BlockIndex, Entry, EventLog
from moonpool.kvstore.slots import SlotMap, SlotState

_UNFIT = re.compile(r"[^A-Za-z0-9_]")
PLACES = 64  # distinct places of mismatches that are counted by name


class Holdings:
    def __init__(self, node: NodeId, incarnation: Incarnation, slots: SlotMap) -> None:
        self.node = node
        self.incarnation = incarnation
        self.slots = slots
        self.log = EventLog(node, incarnation)
        self.index = BlockIndex(self.log)
        self.counted: Counter[str] = Counter()
        self.mismatches: Counter[str] = Counter()  # by place
        self.pins = 0
        self._writing: Counter[bytes] = Counter()  # keys on their way, with how many slots wait for them
        self._ids = 0

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def pin(self, entries: Iterable[Entry], now: float) -> None:
        for entry in entries:
            self.index.pin(entry, now)
            self.pins += 1

    def unpin(self, entries: Iterable[Entry], now: float) -> None:
        for entry in entries:
            self.pins -= 1
            if self.index.unpin(entry, now):
                self.slots.release(entry.slot)

    @property
    def room(self) -> int:
        """Slots that could be had: free ones, and sealed ones that nothing holds."""
        return self.slots.free + self.index.evictable

    def take(self, n: int) -> list[int]:
        """``n`` slots, evicting what must go. Busy, with the numbers, if even that does not help; then nothing changed."""
        if n > self.room:
            counts = self.slots.counts
            raise Busy(
                f"store node {self.node}: {n} slots needed, {self.slots.free} free and {self.index.evictable} evictable of "
                f"{self.slots.total} ({counts[SlotState.RESERVED]} reserved, {counts[SlotState.FENCED]} fenced, the rest "
                "in use); place again, or raise store.pool_bytes",
                peer=self.node,
            )
        while self.slots.free < n:
            entry = self.index.evict()
            if entry is None:
                raise Bug(f"{self.index.evictable} blocks are counted as evictable, but none is")
            self.slots.release(entry.slot)
            self.counted["evicted"] += 1
        return self.slots.take(n)

    def seal(self, key: bytes, parent: bytes | None, slot: int, now: float) -> Entry:
        self.slots.seal(slot)
        return self.index.add(key, parent, slot, now)

    def withdraw(self, key: bytes) -> int:
        """Make ``key`` and its descendants unfindable; slots without pins are free at once. Returns how many there were."""
        gone = self.index.withdraw(key)
        for entry in gone:
            if not entry.pins:
                self.slots.release(entry.slot)
        return len(gone)

    def coming(self, key: bytes) -> bool:
        return key in self._writing

    def expect(self, key: bytes) -> None:
        self._writing[key] += 1

    def expect_no_more(self, key: bytes) -> None:
        self._writing[key] -= 1
        if not self._writing[key]:
            del self._writing[key]

    def mismatch(self, place: str) -> None:
        """Count by ``place``, a short name that comes from a peer: at most ``PLACES`` of them, made fit to be a metric's."""
        place = _UNFIT.sub("_", place[:32])
        self.mismatches[place if place in self.mismatches or len(self.mismatches) < PLACES else "other"] += 1

    def ref(self, entry: Entry) -> SlotRef:
        return self.slots.ref(entry.slot, entry.key)
