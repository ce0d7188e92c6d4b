"""Slots of a store node: where each one lies, what state it is in, which are free, and how sizes share the regions.

A slot is some units (of ``SLOT_ALIGN`` bytes) of one region, named by an int that means nothing by itself. States move
along ``LEGAL`` only: free -> reserved -> sealed -> free, and reserved -> fenced -> free. Sealed slots carry the number of
their owner (a row of the index), so that a span can be vacated: what it holds is copied into other slots of its size.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence, Set
from enum import StrEnum
from heapq import heapify, heappop

from moonpool.core.errors import Bug
from moonpool.core.landing import SlotRef
from moonpool.core.layout import SLOT_ALIGN
from moonpool.kvstore.spans import FreeRuns, Shelf, Span, cut_of, span_units, spans_in


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
FREE, RESERVED, FENCED = -1, -2, -3  # in the owners' table, where rows of sealed slots are 0 and above
_STATES = {FREE: SlotState.FREE, RESERVED: SlotState.RESERVED, FENCED: SlotState.FENCED}
NOWHERE = 0xFFFF  # in the spans' table: a gap between two spans


class SlotMap:
    """All slots of one node. ``on_free(slot)`` hears of every slot whose content died.

    ``move(a, b)`` copies the bytes of slot ``a`` to slot ``b``, of the same size, before it returns.
    """

    def __init__(
        self,
        region_bytes: Sequence[int],
        on_free: Callable[[int], None] | None = None,
        move: Callable[[int, int], None] | None = None,
    ) -> None:
        self._on_free = on_free
        self._copy = move
        self._bases: list[int] = []  # first unit of every region; units of two regions are never neighbours
        self._ground = FreeRuns()  # units that belong to no span
        base = 0
        for size in region_bytes:
            self._bases.append(base)
            self._ground.put(base, base + size // SLOT_ALIGN)
            base += size // SLOT_ALIGN + 1
        self._units = self._ground.count
        self._longest = max((size // SLOT_ALIGN for size in region_bytes), default=0)
        self._target = self._longest
        self._shelves: dict[int, Shelf] = {}  # by size in units
        self._carved: dict[int, int] = {}  # by size: slots that ground in no span would give, until it changes
        self._owner = array("i")  # by slot: FREE, RESERVED, FENCED, or the row that it was sealed for
        self._span_of = array("H")  # by slot
        self._spans: dict[int, Span] = {}
        self._spare_spans: list[int] = []
        self._spare_slots: dict[int, list[int]] = {}  # first slot numbers no longer in use, by how many
        self._starts: list[tuple[int, int]] = []  # (first unit, span), ascending
        self.counts = dict.fromkeys((SlotState.RESERVED, SlotState.FENCED, SlotState.SEALED), 0)
        self.used_bytes = 0  # of slots that are not free
        self.vacated = 0

    # Sizes.

    def register(self, slot_bytes: int) -> None:
        """From now on slots of this size may be taken. Again is a no-op. Bug: not a multiple of SLOT_ALIGN."""
        size = slot_bytes // SLOT_ALIGN
        if size < 1 or slot_bytes % SLOT_ALIGN:
            raise Bug(f"slots of {slot_bytes} bytes: a multiple of {SLOT_ALIGN} is needed")
        if size in self._shelves:
            return
        self._shelves[size] = Shelf(size)
        self._carved.clear()
        self._target = span_units(self._units, self._longest, [s for s in self._shelves if s <= self._longest])
        for number in [n for n, span in self._spans.items() if span.length > 2 * self._target]:
            self._split(number)
        for number, span in [(n, span) for n, span in self._spans.items() if span.free == span.count]:
            shelf = self._shelves[span.size]  # else ground that a long span never used would be lost to other sizes
            self._close(shelf, number, shelf.free.run_of(span.first))

    @property
    def total_bytes(self) -> int:
        return self._units * SLOT_ALIGN

    @property
    def free_bytes(self) -> int:
        """In free slots and in ground that belongs to no size; ends of spans that fit no slot are counted, too."""
        return self.total_bytes - self.used_bytes

    def free(self, slot_bytes: int) -> int:
        """How many slots of this size can be taken as things are."""
        size = slot_bytes // SLOT_ALIGN
        carved = self._carved.get(size)
        if carved is None:
            carved = sum(spans_in(end - start, self._target, size) for start, end in self._ground.runs())
            self._carved[size] = carved
        return self._shelves[size].free.count + carved

    def total(self, slot_bytes: int) -> int:
        """How many slots of this size there are, and could be made of ground that belongs to no size."""
        shelf = self._shelves[slot_bytes // SLOT_ALIGN]
        return shelf.slots - shelf.free.count + self.free(slot_bytes)

    def fits(self, slot_bytes: int) -> int:
        """Slots of this size if it had all regions for itself."""
        return sum((end - base - 1) // (slot_bytes // SLOT_ALIGN) for base, end in self._borders())

    def _borders(self) -> Iterator[tuple[int, int]]:
        ends = [*self._bases[1:], self._units + len(self._bases)]
        return zip(self._bases, ends, strict=True)

    # One slot.

    def state(self, slot: int) -> SlotState:
        return _STATES.get(self._owner[slot], SlotState.SEALED)

    def owner(self, slot: int) -> int | None:
        """The row that a sealed slot belongs to; None for other slots."""
        row = self._owner[slot]
        return row if row >= 0 else None

    def size(self, slot: int) -> int:
        """Bytes."""
        return self._spans[self._span_of[slot]].size * SLOT_ALIGN

    def place(self, slot: int) -> tuple[int, int]:
        """(region, byte offset in it)."""
        span = self._spans[self._span_of[slot]]
        return span.region, (span.offset + (slot - span.first) * span.size) * SLOT_ALIGN

    def places(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(region, byte offset in it) of each."""
        out, spans, span_of, number = [], self._spans, self._span_of, NOWHERE
        region = base = step = 0
        for slot in slots:
            if span_of[slot] != number:
                number = span_of[slot]
                span = spans[number]
                region, step = span.region, span.size * SLOT_ALIGN
                base = span.offset * SLOT_ALIGN - span.first * step
            out.append((region, base + slot * step))
        return out

    def ref(self, slot: int, key: bytes) -> SlotRef:
        return SlotRef(*self.place(slot), key)

    def at(self, region: int, offset: int) -> int | None:
        """The slot that begins at ``offset`` of ``region``; None where none does."""
        if not 0 <= region < len(self._bases) or offset < 0 or offset % SLOT_ALIGN:
            return None
        unit = self._bases[region] + offset // SLOT_ALIGN
        at = bisect_right(self._starts, (unit, len(self._spans) + len(self._spare_spans)))
        if not at:
            return None
        span = self._spans[self._starts[at - 1][1]]
        index, rest = divmod(unit - span.start, span.size)
        return span.first + index if not rest and index < span.count else None

    def __iter__(self) -> Iterator[int]:
        """Every slot of every span, free ones included."""
        for span in self._spans.values():
            yield from range(span.first, span.first + span.count)

    # From state to state.

    def take(self, slot_bytes: int, n: int) -> list[int]:
        """Reserve ``n`` slots, contiguous where possible. Bug where ``free`` says there are fewer."""
        shelf = self._shelves[slot_bytes // SLOT_ALIGN]
        while shelf.free.count < n:
            self._open(shelf)
        out: list[int] = []
        for start, end in shelf.free.take(n):
            self._owner[start:end] = array("i", (RESERVED,)) * (end - start)
            out.extend(range(start, end))
            self._count_free(start, end, -1)
        self.counts[SlotState.RESERVED] += n
        self.used_bytes += n * slot_bytes
        return out

    def seal(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """``slots`` hold whole blocks from now on, which belong to ``rows``."""
        owner = self._owner
        for slot, row in zip(slots, rows, strict=True):
            if owner[slot] != RESERVED:
                raise self._illegal(slot, SlotState.SEALED)
            owner[slot] = row
        self.counts[SlotState.RESERVED] -= len(slots)
        self.counts[SlotState.SEALED] += len(slots)

    def fence(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._owner[slot] != RESERVED:
                raise self._illegal(slot, SlotState.FENCED)
            self._owner[slot] = FENCED
        self.counts[SlotState.RESERVED] -= len(slots)
        self.counts[SlotState.FENCED] += len(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Free them; spans that are empty now go back."""
        owner, others = self._owner, 0
        for slot in slots:
            old = owner[slot]
            if old < 0:
                if old == FREE:
                    raise self._illegal(slot, SlotState.FREE)
                self.counts[_STATES[old]] -= 1
                others += 1
            owner[slot] = FREE
        self.counts[SlotState.SEALED] -= len(slots) - others
        if self._on_free is not None:
            for slot in slots:
                self._on_free(slot)
        for start, end in _runs(slots):
            shelf = self._shelves[self._spans[self._span_of[start]].size]
            self.used_bytes -= (end - start) * shelf.size * SLOT_ALIGN
            run, _ = shelf.free.put(start, end)
            for span in self._count_free(start, end, 1):
                run = self._close(shelf, span, run)

    def _illegal(self, slot: int, to: SlotState) -> Bug:
        return Bug(f"slot {slot}: {self.state(slot)} -> {to} is no legal transition")

    # Spans.

    def _count_free(self, start: int, end: int, sign: int) -> list[int]:
        """Slots of a run, which may reach over spans that were one once, are free now or no more. Returns empty spans."""
        empty = []
        while start < end:
            number = self._span_of[start]
            span = self._spans[number]
            upto = min(end, span.first + span.count)
            span.free += sign * (upto - start)
            if span.free == span.count:
                empty.append(number)
            start = upto
        return empty

    def _open(self, shelf: Shelf) -> None:
        """A new span: from the shortest free ground that is long enough for a whole one, else from the longest there is."""
        runs = [(end - start, start) for start, end in self._ground.runs() if end - start >= shelf.size]
        if not runs:
            raise Bug(f"no room for slots of {shelf.size * SLOT_ALIGN} bytes")
        length, start = min((r for r in runs if r[0] >= self._target), default=max(runs))
        length = cut_of(length, self._target)
        self._ground.cut(start, start, start + length)
        self._carved.clear()
        count = length // shelf.size
        region = bisect_right(self._bases, start) - 1
        first = self._numbers(count)
        span = Span(start, length, region, start - self._bases[region], shelf.size, first, count, count)
        self._add(span)
        shelf.slots += count
        shelf.free.put(first, first + count)

    def _numbers(self, count: int) -> int:
        """``count`` slot numbers in a row, with a gap after them."""
        spare = self._spare_slots.get(count)
        if spare:
            return spare.pop()
        first = len(self._owner)
        self._owner.extend([FREE] * (count + 1))
        self._span_of.extend([NOWHERE] * (count + 1))
        return first

    def _add(self, span: Span) -> None:
        number = self._spare_spans.pop() if self._spare_spans else len(self._spans)
        self._spans[number] = span
        self._shelves[span.size].spans.add(number)
        insort(self._starts, (span.start, number))
        self._span_of[span.first : span.first + span.count] = array("H", (number,)) * span.count

    def _remove(self, number: int) -> Span:
        span = self._spans.pop(number)
        self._spare_spans.append(number)
        self._shelves[span.size].spans.discard(number)
        del self._starts[bisect_right(self._starts, (span.start, number)) - 1]
        return span

    def _close(self, shelf: Shelf, number: int, run: int) -> int:
        """All of a span is free, in the run that begins at slot ``run``. Returns where the run's rest behind it begins."""
        span = self._remove(number)
        end = span.first + span.count
        shelf.free.cut(run, span.first, end)
        shelf.slots -= span.count
        self._span_of[span.first : end] = array("H", (NOWHERE,)) * span.count
        if self._span_of[end] == NOWHERE and (not span.first or self._span_of[span.first - 1] == NOWHERE):
            self._spare_slots.setdefault(span.count, []).append(span.first)  # else: part of a longer span once, no gaps
        self._ground.put(span.start, span.start + span.length)
        self._carved.clear()
        return end

    def _split(self, number: int) -> None:
        """Make several spans of one that is longer than wanted now; its slots stay what they are."""
        whole = self._remove(number)
        per = max(self._target // whole.size, 1)
        for index in range(0, whole.count, per):
            count = min(per, whole.count - index)
            last = index + count == whole.count
            length = whole.length - index * whole.size if last else count * whole.size
            first, shift = whole.first + index, index * whole.size
            free = self._owner[first : first + count].count(FREE)
            self._add(Span(whole.start + shift, length, whole.region, whole.offset + shift, whole.size, first, count, free))

    # Vacating a span, so that another size can have its ground.

    def movable(self, slot_bytes: int, into_bytes: int, pinned: Set[int]) -> Iterator[tuple[int, int, int]]:
        """(used slots, all slots, span) of the spans of one size that may be vacated, and could hold slots of another.

        All that such a span holds are sealed slots whose owners nobody has ``pinned``. The least used first. It can be
        vacated once as many slots of its size are free, in whatever span, as it has in all.
        """
        spans, least = self._spans, into_bytes // SLOT_ALIGN
        numbers = self._shelves[slot_bytes // SLOT_ALIGN].spans
        fitting = [(s.count - s.free, s.count, n) for n in numbers if (s := spans[n]).length >= least]
        heapify(fitting)
        while fitting:
            used, count, number = heappop(fitting)
            first = spans[number].first
            owners = self._owner[first : first + count]
            if RESERVED not in owners and FENCED not in owners and pinned.isdisjoint(owners):
                yield used, count, number

    def open_slots(self, slot_bytes: int) -> tuple[int, int]:
        """(all, free) slots in spans of this size."""
        shelf = self._shelves[slot_bytes // SLOT_ALIGN]
        return shelf.slots, shelf.free.count

    def length(self, number: int) -> int:
        """Bytes of a span."""
        return self._spans[number].length * SLOT_ALIGN

    def per_span(self, slot_bytes: int) -> int:
        """Slots of this size in a span of the usual length."""
        return max(self._target * SLOT_ALIGN // slot_bytes, 1)

    def vacate(self, number: int) -> list[tuple[int, int]]:
        """Move what the span holds into other slots of its size, and give its ground back. Returns (row, new slot)."""
        span = self._spans[number]
        shelf = self._shelves[span.size]
        end = span.first + span.count
        held = [(slot, row) for slot, row in enumerate(self._owner[span.first : end], span.first) if row != FREE]
        for start, stop in _runs([slot for slot in range(span.first, end) if self._owner[slot] == FREE]):
            shelf.free.cut(shelf.free.run_of(start), start, stop)
        span.free = 0
        new = self.take(span.size * SLOT_ALIGN, len(held))
        if self._copy is not None:
            for (slot, _), to in zip(held, new, strict=True):
                self._copy(slot, to)
        rows = [row for _, row in held]
        self.seal(new, rows)
        moved = list(zip(rows, new, strict=True))
        free = [slot for slot in range(span.first, end) if self._owner[slot] == FREE]
        for start, stop in _runs(free):
            shelf.free.put(start, stop)
            span.free += stop - start
        self.vacated += 1
        if held:
            self.release([slot for slot, _ in held])
        else:
            self._close(shelf, number, shelf.free.run_of(span.first))
        return moved


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """``slots``, in any order, as runs (first, after the last)."""
    out = []
    ordered = sorted(slots)
    start = before = ordered[0] if ordered else 0
    for slot in ordered[1:]:
        if slot != before + 1:
            out.append((start, before + 1))
            start = slot
        before = slot
    return [*out, (start, before + 1)] if ordered else []
