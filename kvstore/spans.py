"""Free places as runs, and spans: parts of regions that hold slots of one size.

Regions are cut into spans as slots are asked for; a span belongs to one slot size until all its slots are free, then its
ground goes back, together with the free ground beside it. So several slot sizes share the regions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.errors import Bug

SPANS = 128  # of the pool one span is this part, where regions allow: free slots of a size wait in at most about one span
LEAST_SLOTS = 8  # of the largest size in a span
CHOICES = 2.0  # a span may be this many times the length wanted, where all sizes fit it with less waste


class FreeRuns:
    """Free numbers as maximal runs ``start .. end - 1``. What must never be one run is kept apart by a gap in the numbers."""

    def __init__(self) -> None:
        self._end: dict[int, int] = {}  # first number of a run -> number after it
        self._start: dict[int, int] = {}  # number after a run -> its first number
        self.count = 0

    def __len__(self) -> int:
        return len(self._end)

    def runs(self) -> list[tuple[int, int]]:
        return list(self._end.items())

    def put(self, start: int, end: int) -> tuple[int, int]:
        """Free these; returns the run they are part of now."""
        self.count += end - start
        if start in self._start:
            before = self._start.pop(start)
            del self._end[before]
            start = before
        if end in self._end:
            after = self._end.pop(end)
            del self._start[after]
            end = after
        self._end[start] = end
        self._start[end] = start
        return start, end

    def cut(self, run: int, start: int, end: int) -> None:
        """Take ``start .. end - 1`` out of the run that begins at ``run``."""
        last = self._end.pop(run)
        del self._start[last]
        if not run <= start < end <= last:
            raise Bug(f"{start} to {end} is not free: the run is {run} to {last}")
        if run < start:
            self._end[run] = start
            self._start[start] = run
        if end < last:
            self._end[end] = last
            self._start[last] = end
        self.count -= end - start

    def run_of(self, number: int) -> int:
        """The first number of the run that ``number`` is in. Bug if it is not free. Slow where runs are many."""
        for start, end in self._end.items():
            if start <= number < end:
                return start
        raise Bug(f"{number} is not free")

    def take(self, n: int) -> list[tuple[int, int]]:
        """Runs of ``n`` numbers, ascending: one run where one is long enough (the shortest such), else as few as possible."""
        if n > self.count:
            raise Bug(f"{n} taken where {self.count} are free")
        if not n:
            return []
        best, most = -1, 0
        for start, end in self._end.items():
            length = end - start
            if length >= n and (best < 0 or length < most):
                best, most = start, length
                if length == n:
                    break
        if best < 0:
            return self._take_several(n)
        self.cut(best, best, best + n)
        return [(best, best + n)]

    def _take_several(self, n: int) -> list[tuple[int, int]]:
        """The longest runs, and for the rest the shortest that is long enough."""
        runs = sorted((end - start, start) for start, end in self._end.items())
        out = []
        while n > 0:
            if runs[-1][0] >= n:
                length, start = runs[bisect_left(runs, (n, 0))]
                length = n
            else:
                length, start = runs.pop()
            self.cut(start, start, start + length)
            out.append((start, start + length))
            n -= length
        out.sort()
        return out


@dataclass(slots=True, eq=False)
class Span:
    """``count`` slots of ``size`` units, numbered from ``first``, at unit ``start`` of the pool. ``length`` may be longer."""

    start: int
    length: int
    region: int
    offset: int  # units from the beginning of the region
    size: int
    first: int
    count: int
    free: int


@dataclass(slots=True, eq=False)
class Shelf:
    """All spans of one slot size, in units."""

    size: int
    free: FreeRuns = field(default_factory=FreeRuns)  # slot numbers
    spans: set[int] = field(default_factory=set)
    slots: int = 0


def span_units(total: int, region: int, sizes: Sequence[int]) -> int:
    """How long spans are: a small part of the pool in which every size leaves little over. All in units.

    Long spans waste less at their ends, short ones let sizes change hands sooner. With one size, spans are whole regions.
    """
    if len(sizes) < 2:
        return region
    largest = max(sizes)
    least = min(max(total // SPANS, LEAST_SLOTS * largest), region)
    fewest, most = max(least // largest, 1), max(min(int(least * CHOICES), region) // largest, 1)
    lengths = [n * largest for n in range(fewest, most + 1)]
    return min(lengths, key=lambda length: (max(length % size for size in sizes) / length, length))


def spans_in(length: int, target: int, size: int) -> int:
    """Slots of ``size`` that free ground of ``length`` gives when it is cut by ``cut_of``."""
    whole = 0 if 2 * length < 3 * target else (2 * length - 3 * target) // (2 * target) + 1
    return whole * (target // size) + (length - whole * target) // size


def cut_of(length: int, target: int) -> int:
    """How much of a free run of ``length`` the next span takes: the rest must not be less than half a span."""
    return length if 2 * length < 3 * target else target
