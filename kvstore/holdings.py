"""Slots and index together: what landings, reservations and tickets all do to a slot.

Every sealed slot has one index entry, findable or withdrawn; a withdrawn one lives until its last pin ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from moonpool.core.errors import Busy, LayoutMismatch
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.index import BlockIndex, Entry, EventLog
from moonpool.kvstore.slots import SlotMap, SlotState

_UNFIT = re.compile(r"[^A-Za-z0-9_]")
LAYOUTS = 1024  # registered at one node; more would be somebody's mistake, or malice
PLACES = 64  # distinct places of mismatches that are counted by name


class Holdings:
    def __init__(self, node: NodeId, incarnation: Incarnation, slots: SlotMap) -> None:
        self.node = node
        self.incarnation = incarnation
        self.slots = slots
        self.log = EventLog(node, incarnation)
        self.index = BlockIndex(self.log)
        self.layouts: dict[str, KVLayout] = {}  # by fingerprint
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
                self.slots.release([entry.slot])

    def register(self, layout: KVLayout, who: str) -> None:
        """Blocks of this layout may be stored from now on; again is a no-op. Other models live side by side.

        LayoutMismatch, with both values: this model is known with another block size or shape, or its blocks are larger
        than a region.
        """
        if self.layouts.get(layout.fingerprint) == layout:
            return
        name = (layout.model, layout.dtype, layout.order, layout.codec)
        for known in self.layouts.values():
            if (known.model, known.dtype, known.order, known.codec) == name:
                known.require_same(layout, who)
        if not self.slots.fits(layout.slot_bytes):
            raise LayoutMismatch(
                f"a block of model {layout.model} needs {layout.slot_bytes} bytes, which is more than a region of node "
                f"{self.node} has; raise store.region_bytes and store.pool_bytes"
            )
        if len(self.layouts) >= LAYOUTS:
            raise LayoutMismatch(f"node {self.node} knows {LAYOUTS} KV layouts, and takes no more until it is restarted")
        self.slots.register(layout.slot_bytes)
        self.layouts[layout.fingerprint] = layout

    def layout(self, fingerprint: str) -> KVLayout:
        """LayoutMismatch, naming what is registered, where this one is not."""
        known = self.layouts.get(fingerprint)
        if known is None:
            here = ", ".join(f"{one.fingerprint} (model {one.model})" for one in self.layouts.values()) or "none"
            raise LayoutMismatch(f"KV layout {fingerprint} is not registered at node {self.node}; it has {here}")
        return known

    def leading(self, keys: Sequence[bytes], layout: str) -> list[Entry]:
        """Entries of the leading ``keys`` that are here; of the layout with this fingerprint only, where one is named."""
        found = self.index.leading(keys)
        if not layout:
            return found
        return list(takewhile(lambda entry: entry.layout.fingerprint == layout, found))

    @property
    def evictable_bytes(self) -> int:
        entries = map(self.index.get, self.index.keys())
        return sum(entry.layout.slot_bytes for entry in entries if entry is not None and not entry.busy)

    def room(self, slot_bytes: int) -> int:
        """Slots of a size that could be had: free ones, and those that nothing holds."""
        return self.slots.free(slot_bytes) + self.index.evictable

    def take(self, slot_bytes: int, n: int) -> list[int]:
        """``n`` slots, evicting what must go. Busy, with the numbers, if even that does not help."""
        slots = self.slots
        if n <= self.room(slot_bytes):
            while slots.free(slot_bytes) < n:
                entry = self.index.evict()
                if entry is None:
                    break
                slots.release([entry.slot])
                self.counted["evicted"] += 1
            else:
                return slots.take(slot_bytes, n)
        counts = slots.counts
        raise Busy(
            f"store node {self.node}: {n} slots needed, {slots.free(slot_bytes)} free and {self.index.evictable} evictable of "
            f"{slots.total(slot_bytes)} ({counts[SlotState.RESERVED]} reserved, {counts[SlotState.FENCED]} fenced, the rest "
            "in use); place again, or raise store.pool_bytes",
            peer=self.node,
        )

    def take_some(self, slot_bytes: int, n: int) -> list[int]:
        """At most ``n`` slots: fewer where even eviction does not help."""
        while n:
            try:
                return self.take(slot_bytes, n)
            except Busy:
                n = min(n - 1, self.room(slot_bytes))
        return []

    def seal(self, key: bytes, parent: bytes | None, slot: int, layout: KVLayout, use: Use, now: float) -> Entry:
        self.slots.seal([slot], [0])
        return self.index.add(key, parent, slot, layout, use, now)

    def withdraw(self, key: bytes) -> int:
        """Make ``key`` and its descendants unfindable; slots without pins are free at once. Returns how many there were."""
        gone = self.index.withdraw(key)
        self.slots.release([entry.slot for entry in gone if not entry.pins])
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
