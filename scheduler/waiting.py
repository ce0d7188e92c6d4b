"""Requests that wait for a prefill worker, smallest key first."""

from __future__ import annotations

import bisect
import heapq

import numpy as np
from numpy.typing import NDArray

from moonpool.scheduler.policy import Waiting


class WaitingQueue:
    """At most ``limit`` requests, one entry each. Ties go by arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order: list[tuple[float, int]] = []  # (key, order), sorted
        self._entries: list[Waiting] = []  # in the same order
        self._places: dict[str, tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return len(self._entries) >= self._limit

    def add(self, waiting: Waiting, key: float) -> None:
        self.remove(waiting.request.request)
        place = (key, waiting.order)
        at = bisect.bisect_left(self._order, place)
        self._order.insert(at, place)
        self._entries.insert(at, waiting)
        self._places[waiting.request.request] = place

    def remove(self, request: str) -> bool:
        place = self._places.pop(request, None)
        if place is None:
            return False
        at = bisect.bisect_left(self._order, place)
        del self._order[at], self._entries[at]
        return True

    def nth(self, n: int) -> Waiting | None:
        return self._entries[n] if n < len(self._entries) else None

    def wait_s(self, key: float, busy_s: NDArray[np.float64]) -> float:
        """Seconds until a request with ``key`` would be begun: those before it go to whichever worker is free first.

        ``busy_s``: [workers] seconds until each is free. List scheduling (Graham, 1966).
        """
        free: list[float] = busy_s.tolist()
        if not free:
            return 0.0
        heapq.heapify(free)
        for place, waiting in zip(self._order, self._entries, strict=True):
            if place[0] > key:
                break
            heapq.heapreplace(free, free[0] + waiting.work_s)
        return free[0]
