"""How long the next id of a running answer may take, so that the answer meets its target. Pure: ``now`` is an argument.

A target of time between tokens (TBT) is met when the mean of the slowest tenth of an answer's gaps is within it. So an answer
whose ids came fast may bear a gap that is longer than its target now and then: exactly as long as the mean allows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

KEPT = 64  # slowest gaps that are remembered: of longer answers fewer than a tenth, which is stricter than the target
STEADY_SHARE = 0.8  # of its target that a gap takes as a rule: the rest is for what was not predicted
MOST_SHARE = 0.95  # of what an answer can bear at all, where a prompt would be late otherwise


@dataclass(frozen=True, slots=True)
class Room:
    """Seconds until running answers want their next ids: ``steady_s`` as a rule, ``most_s`` (not less) for a prompt that would
    miss its own target otherwise. Infinite: nobody waits for one."""

    steady_s: float = inf
    most_s: float = inf

    @property
    def free(self) -> bool:
        return self.steady_s == inf


class Gaps:
    """Times between the ids of one answer."""

    __slots__ = ("_count", "_last", "_slowest")

    def __init__(self, now: float) -> None:
        """Its first id is there ``now``."""
        self._last = now
        self._count = 0
        self._slowest: list[float] = []  # ascending, the ``KEPT`` longest ones

    def told(self, now: float) -> None:
        """Its next id."""
        insort(self._slowest, now - self._last)
        del self._slowest[:-KEPT]
        self._last = now
        self._count += 1

    def longest_s(self, target_s: float) -> float:
        """The longest next gap with which the mean of the slowest tenth is still within ``target_s``; 0 where none is."""
        judged = min(self._count // 10 + 1, KEPT)  # of one gap more than now: ceil((count + 1) / 10)
        slowest = self._slowest[-judged:]
        if sum(slowest) > judged * target_s:
            return 0.0
        return judged * target_s - sum(slowest[len(slowest) - (judged - 1) :])

    def room(self, target_s: float, now: float) -> Room:
        """From ``now`` on; never negative. An answer that has missed its target goes on at its steady pace."""
        steady = STEADY_SHARE * target_s
        most = MOST_SHARE * self.longest_s(target_s) or steady
        waited = now - self._last
        return Room(max(min(steady, most) - waited, 0.0), max(most - waited, 0.0))


def tightest(rooms: Iterable[Room]) -> Room:
    steady, most = inf, inf
    for room in rooms:
        steady, most = min(steady, room.steady_s), min(most, room.most_s)
    return Room(steady, most)
