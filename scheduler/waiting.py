"""Requests that wait for a prefill worker, in the order they shall go.

Those that waited for longer than the cap go first, oldest first, whatever their class: that bounds every wait. Then the
higher priority, then the smaller key, then the earlier arrival.
"""

from __future__ import annotations

import bisect
import heapq

import numpy as np
from numpy.typing import NDArray

from moonpool.scheduler.policy import Waiting

Place = tuple[int, float, int]  # (-priority, key, order)


class WaitingQueue:
    """At most ``limit`` requests, one entry each. ``cap_s``: the longest a request is passed over for others."""

    def __init__(self, limit: int, cap_s: float = float("inf")) -> None:
        self._limit = limit
        self._cap_s = cap_s
        self._order: list[Place] = []  # sorted
        self._entries: list[Waiting] = []  # in the same order
        self._places: dict[str, tuple[Place, Waiting]] = {}  # oldest first
        self.prompt_tokens = 0  # of all who wait

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) >= self._limit

    def add(self, waiting: Waiting, key: float) -> None:
        self.remove(waiting.request.request)
        place = (-waiting.request.priority, key, waiting.order)
        at = bisect.bisect_left(self._order, place)
        self._order.insert(at, place)
        self._entries.insert(at, waiting)
        self._places[waiting.request.request] = place, waiting
        self.prompt_tokens += waiting.request.prompt_tokens

    def remove(self, request: str) -> bool:
        found = self._places.pop(request, None)
        if found is None:
            return False
        at = bisect.bisect_left(self._order, found[0])
        del self._order[at], self._entries[at]
        self.prompt_tokens -= found[1].request.prompt_tokens
        return True

    def nth(self, n: int, now: float) -> Waiting | None:
        """The one that is to go after ``n`` others."""
        overdue = self._overdue(now)
        if n < len(overdue):
            return overdue[n]
        if not overdue:
            return self._entries[n] if n < len(self._entries) else None
        late = {waiting.order for waiting in overdue}
        rest = (waiting for waiting in self._entries if waiting.order not in late)
        return next((waiting for i, waiting in enumerate(rest, len(overdue)) if i == n), None)

    def _overdue(self, now: float) -> list[Waiting]:
        out = []
        for _, waiting in self._places.values():
            if now - waiting.arrived < self._cap_s:
                break
            out.append(waiting)
        return out

    def wait_s(self, waiting: Waiting, key: float, busy_s: NDArray[np.float64]) -> float:
        """Seconds until ``waiting`` would be begun: those before it go to whichever worker is free first.

        ``busy_s``: [workers] seconds until each is free. List scheduling (Graham, 1966).
        """
        free: list[float] = busy_s.tolist()
        if not free:
            return 0.0
        heapq.heapify(free)
        place = (-waiting.request.priority, key, waiting.order)
        for before in self._entries[: bisect.bisect_left(self._order, place)]:
            heapq.heapreplace(free, free[0] + before.work_s)
        return free[0]
