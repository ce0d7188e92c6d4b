"""Slots of a store node: where each one lies, what state it is in, and which are free.

A slot is ``slot_bytes`` of one region. States move along ``LEGAL`` only:
free -> reserved -> sealed -> free, and reserved -> fenced -> free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import StrEnum

from moonpool.core.errors import Bug
from moonpool.core.landing import SlotRef


class SlotState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"  # a writer may write it
    FENCED = "fenced"  # given up by its readers, but its writer might still write: waits for proof
    SEALED = "sealed"  # a whole block, all layers verified


LEGAL: dict[SlotState, tuple[SlotState, ...]] = {
    SlotState.FREE: (SlotState.RESERVED,),
    SlotState.RESERVED: (SlotState.SEALED, SlotState.FENCED, SlotState.FREE),
    SlotState.FENCED: (SlotState.FREE,),
    SlotState.SEALED: (SlotState.FREE,),
}


class FreeRuns:
    """Free slots as maximal runs; a run never crosses a region border, because descriptors coalesce inside regions only."""

    def __init__(self, borders: Sequence[int]) -> None:
        self._borders = frozenset(borders)  # first slot of every region, and the number of slots
        self._end: dict[int, int] = {}  # first slot of a run -> slot after it
        self._start: dict[int, int] = {}  # slot after a run -> its first slot
        self.count = 0
        for start, end in itertools.pairwise(borders):
            self._put(start, end)
            self.count += end - start

    def _put(self, start: int, end: int) -> None:
        self._end[start] = end
        self._start[end] = start

    def _drop(self, start: int) -> int:
        end = self._end.pop(start)
        del self._start[end]
        return end

    def take(self, n: int) -> list[int]:
        """``n`` slots, ascending: one run where one is long enough (the shortest such), else as few runs as possible."""
        if n > self.count:
            raise Bug(f"{n} slots taken where {self.count} are free")
        out: list[int] = []
        while len(out) < n:
            need = n - len(out)
            fitting = [s for s, e in self._end.items() if e - s >= need]
            if fitting:
                start = min(fitting, key=lambda s: (self._end[s] - s, s))
            else:
                start = max(self._end, key=lambda s: (self._end[s] - s, -s))
            end = self._drop(start)
            cut = min(start + need, end)
            out.extend(range(start, cut))
            if cut < end:
                self._put(cut, end)
        self.count -= n
        return sorted(out)

    def give(self, slot: int) -> None:
        start, end = slot, slot + 1
        if slot in self._start and slot not in self._borders:
            start = self._start[slot]
            self._drop(start)
        if end in self._end and end not in self._borders:
            end = self._drop(end)
        self._put(start, end)
        self.count += 1


class SlotMap:
    """All slots of one node, numbered over its regions. ``on_free`` hears of every slot whose content died."""

    def __init__(self, slot_bytes: int, slots_per_region: Sequence[int], on_free: Callable[[int], None] | None = None) -> None:
        self.slot_bytes = slot_bytes
        self._first = [0]  # first slot of each region, then the number of slots
        for n in slots_per_region:
            self._first.append(self._first[-1] + n)
        self.total = self._first[-1]
        self._region = [r for r, n in enumerate(slots_per_region) for _ in range(n)]
        self._state = [SlotState.FREE] * self.total
        self._runs = FreeRuns(self._first)
        self._on_free = on_free
        self.counts = dict.fromkeys(SlotState, 0) | {SlotState.FREE: self.total}

    @property
    def free(self) -> int:
        return self._runs.count

    def state(self, slot: int) -> SlotState:
        return self._state[slot]

    def take(self, n: int) -> list[int]:
        """Reserve ``n`` free slots, contiguous where possible."""
        taken = self._runs.take(n)
        for slot in taken:
            self._move(slot, SlotState.RESERVED)
        return taken

    def seal(self, slot: int) -> None:
        self._move(slot, SlotState.SEALED)

    def fence(self, slot: int) -> None:
        self._move(slot, SlotState.FENCED)

    def release(self, slot: int) -> None:
        self._move(slot, SlotState.FREE)
        if self._on_free is not None:
            self._on_free(slot)
        self._runs.give(slot)

    def _move(self, slot: int, to: SlotState) -> None:
        old = self._state[slot]
        if to not in LEGAL[old]:
            raise Bug(f"slot {slot}: {old} -> {to} is no legal transition")
        self._state[slot] = to
        self.counts[old] -= 1
        self.counts[to] += 1

    def ref(self, slot: int, key: bytes) -> SlotRef:
        region = self._region[slot]
        return SlotRef(region, (slot - self._first[region]) * self.slot_bytes, key)

    def at(self, region: int, offset: int) -> int | None:
        """The slot that begins at ``offset`` of ``region``; None where none does."""
        if not 0 <= region < len(self._first) - 1 or offset < 0 or offset % self.slot_bytes:
            return None
        slot = self._first[region] + offset // self.slot_bytes
        return slot if slot < self._first[region + 1] else None
