"""Requests that wait for a prefill worker, in the order they shall go.

Those that may not be passed over any more go first, the most pressing of them at the head, whatever their class: who waited
for longer than the cap, which bounds every wait, and who would miss its target for the first token if it were not begun now.
Then the higher priority, then the smaller key, then the earlier arrival.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moonpool.scheduler.policy import Waiting, pressed

Place = tuple[int, float, int]  # (-priority, key, order)
Pressing = tuple[float, int]  # (due, order)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Of one who would join: ``wait_s`` until it is begun, and those whom it would delay although they would otherwise meet
    their targets, with their times to first token as predicted then."""

    wait_s: float
    delayed: tuple[tuple[Waiting, float], ...] = ()

    @property
    def pressed(self) -> float:
        """The worst of these times over its target; 0: nobody is delayed."""
        return pressed(self.delayed)


@dataclass(slots=True)
class _Entry:
    waiting: Waiting
    place: Place
    due: float  # from then on it goes first


@dataclass(slots=True)
class _Line:
    """Who goes when: entries by place and by due time, both sorted."""

    by_place: list[_Entry]
    by_due: list[_Entry]
    begun: dict[int, float] = field(default_factory=dict)  # order -> seconds from now

    def run(self, free: list[float], now: float, until: int | None = None) -> None:
        """List scheduling (Graham, 1966): whichever worker is free first takes the next; stops after ``until`` was begun."""
        heapq.heapify(free)
        plain, pressing = iter(self.by_place), iter(self.by_due)
        urgent, plainest = next(pressing, None), next(plain, None)
        for _ in range(len(self.by_place)):
            at = free[0]
            while urgent is not None and urgent.waiting.order in self.begun:
                urgent = next(pressing, None)
            while plainest is not None and plainest.waiting.order in self.begun:
                plainest = next(plain, None)
            if urgent is None or plainest is None:
                return
            entry = urgent if urgent.due <= now + at + plainest.waiting.work_s else plainest
            self.begun[entry.waiting.order] = at
            if entry.waiting.order == until:
                return
            heapq.heapreplace(free, at + entry.waiting.work_s)


class WaitingQueue:
    """At most ``limit`` requests, one entry each. ``cap_s``: the longest a request is passed over for others."""

    def __init__(self, limit: int, cap_s: float = float("inf")) -> None:
        self._limit = limit
        self._cap_s = cap_s
        self._order: list[Place] = []  # sorted
        self._entries: list[_Entry] = []  # in the same order
        self._dues: list[Pressing] = []  # sorted
        self._pressing: list[_Entry] = []  # in the same order
        self._known: dict[str, _Entry] = {}
        self.prompt_tokens = 0  # of all who wait
        self._with_target = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) >= self._limit

    def add(self, waiting: Waiting, key: float) -> None:
        self.remove(waiting.request.request)
        entry = self._entry(waiting, key)
        at = bisect.bisect_left(self._order, entry.place)
        self._order.insert(at, entry.place)
        self._entries.insert(at, entry)
        due = entry.due, waiting.order
        at = bisect.bisect_left(self._dues, due)
        self._dues.insert(at, due)
        self._pressing.insert(at, entry)
        self._known[waiting.request.request] = entry
        self.prompt_tokens += waiting.request.prompt_tokens
        self._with_target += waiting.target_s is not None

    def remove(self, request: str) -> bool:
        entry = self._known.pop(request, None)
        if entry is None:
            return False
        at = bisect.bisect_left(self._order, entry.place)
        del self._order[at], self._entries[at]
        at = bisect.bisect_left(self._dues, (entry.due, entry.waiting.order))
        del self._dues[at], self._pressing[at]
        self.prompt_tokens -= entry.waiting.request.prompt_tokens
        self._with_target -= entry.waiting.target_s is not None
        return True

    def nth(self, n: int, now: float) -> Waiting | None:
        """The one that is to go after ``n`` others."""
        return next(islice(self.in_order(now), n, None), None)

    def in_order(self, now: float) -> Iterator[Waiting]:
        """All of them, the next one first. Nobody may join or leave meanwhile."""
        pressing = self._pressing_at(now)
        for entry in islice(self._pressing, pressing):
            yield entry.waiting
        first = {entry.waiting.order for entry in islice(self._pressing, pressing)}
        for entry in self._entries:
            if entry.waiting.order not in first:
                yield entry.waiting

    def last(self) -> Waiting:
        """Who would go last by place."""
        return self._entries[-1].waiting

    def _pressing_at(self, now: float) -> int:
        """How many would be due before who is next by place were done: a prompt is not interrupted."""
        until = now + self._entries[0].waiting.work_s if self._entries and self._with_target else now
        return bisect.bisect_right(self._dues, (until, 1 << 62))

    def is_pressing(self, waiting: Waiting, now: float) -> bool:
        """It may not be passed over any more."""
        entry = self._known.get(waiting.request.request)
        return entry is not None and entry.due <= now

    def next_due(self, after: float) -> float | None:
        """When the next one gets pressing."""
        at = bisect.bisect_right(self._dues, (after, 1 << 62))
        return self._dues[at][0] if at < len(self._dues) and self._dues[at][0] < float("inf") else None

    def outlook(self, waiting: Waiting, key: float, busy_s: NDArray[np.float64], now: float) -> Outlook:
        """What joining would come to, nobody else arriving. ``busy_s``: [workers] seconds until each is free."""
        free: list[float] = busy_s.tolist()
        if not free:
            return Outlook(0.0)
        entry = self._entry(waiting, key)
        if not self._with_target and waiting.target_s is None:
            return Outlook(self._wait_s(entry, free))
        at, due_at = bisect.bisect_left(self._order, entry.place), bisect.bisect_left(self._dues, (entry.due, waiting.order))
        by_place = [*self._entries[:at], entry, *self._entries[at:]]
        line = _Line(by_place, [*self._pressing[:due_at], entry, *self._pressing[due_at:]])
        line.run(list(free), now)
        without = _Line(self._entries, self._pressing)
        without.run(list(free), now)
        here = (entry.waiting for entry in self._entries)
        return Outlook(line.begun[waiting.order], delayed(here, line.begun, without.begun, now))

    def _wait_s(self, entry: _Entry, free: list[float]) -> float:
        """Without targets only those before it count."""
        heapq.heapify(free)
        for before in self._entries[: bisect.bisect_left(self._order, entry.place)]:
            heapq.heapreplace(free, free[0] + before.waiting.work_s)
        return free[0]

    def _entry(self, waiting: Waiting, key: float) -> _Entry:
        due = min(waiting.arrived + self._cap_s, waiting.latest)
        return _Entry(waiting, (-waiting.request.priority, key, waiting.order), due)


def delayed(
    here: Iterable[Waiting], begun: Mapping[int, float], without: Mapping[int, float], now: float
) -> tuple[tuple[Waiting, float], ...]:
    """Those ``here`` who would meet their targets if they began as in ``without`` (seconds from ``now`` by order) and begin
    later in ``begun``, with their times to first token then."""
    out = []
    for one in here:
        if one.target_s is not None and begun[one.order] > without[one.order] + 1e-9:
            before, after = (one.alone_s + now - one.arrived + at[one.order] for at in (without, begun))
            if before <= one.target_s:
                out.append((one, after))
    return tuple(out)
