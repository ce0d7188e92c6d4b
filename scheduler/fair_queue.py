"""Requests of several tenants that wait for a prefill worker: each tenant's in its own order, the tenants in turn.

Whose turn it is goes by predicted seconds of prefill over the tenant's weight (``core.fairness``). Within a tenant the order
is that of its ``WaitingQueue``: pressing ones, priorities and shortest-first with ageing count among its own requests only,
so that a flood of urgent or short ones goes before nobody else's. Of one tenant alone this is that queue and nothing more.
A full queue takes from the tenant that fills most of it ("buffer stealing", Suter et al., INFOCOM 1998): its last one goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moonpool.core.fairness import FairClock, in_turn
from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.policy import Waiting
from moonpool.scheduler.waiting import Outlook, WaitingQueue, delayed


class FairQueue:
    """At most ``limit`` requests, one entry each. ``cap_s``: the longest one is passed over for others of its tenant."""

    def __init__(self, limit: int, cap_s: float = float("inf")) -> None:
        self._limit = limit
        self._cap_s = cap_s
        self._clock = FairClock()
        self._lines: dict[str, WaitingQueue] = {}  # of tenants that wait
        self._weights: dict[str, float] = {}  # of the same
        self._tenants: dict[str, str] = {}  # by request

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def full(self) -> bool:
        return len(self._tenants) >= self._limit

    @property
    def tenants(self) -> int:
        """How many of them wait."""
        return len(self._lines)

    def backlog(self, tenant: str) -> tuple[int, int]:
        """Requests, and tokens of their prompts, that one more of ``tenant`` has to count with: all of them where it waits
        alone, else as many as it has itself for each that waits."""
        tokens = sum(line.prompt_tokens for line in self._lines.values())
        others = len(self._lines.keys() - {tenant})
        if not others:
            return len(self), tokens
        mine = self._lines.get(tenant)
        requests = (len(mine) if mine else 0) * (others + 1) + others
        of_mine = mine.prompt_tokens * (others + 1) if mine else 0
        return min(requests, len(self)), min(max(of_mine, tokens * requests // max(len(self), 1)), tokens)

    def add(self, waiting: Waiting, key: float) -> None:
        request = waiting.request
        self.remove(request.request)
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = self._new_line()
            self._clock.join(request.tenant)
        line.add(waiting, key)
        self._weights[request.tenant] = _weight(request)
        self._tenants[request.request] = request.tenant

    def remove(self, request: str) -> bool:
        tenant = self._tenants.pop(request, None)
        if tenant is None:
            return False
        line = self._lines[tenant]
        line.remove(request)
        if not len(line):
            del self._lines[tenant], self._weights[tenant]
        return True

    def served(self, request: PlaceRequest, work_s: float) -> None:
        """It was given a worker, whether it waited or not: ``work_s`` predicted seconds of its time."""
        self._clock.serve(request.tenant, work_s, _weight(request))

    def displaced_by(self, request: PlaceRequest) -> Waiting | None:
        """Who leaves a full queue for ``request``: the last one of the tenant with the most places for its weight; None where
        that is the newcomer's own, which is then the one too many."""
        mine = self._lines.get(request.tenant)
        most = (len(mine) if mine else 0) + 1.0
        tenant = max(self._lines, key=lambda name: len(self._lines[name]) / self._weights[name], default=request.tenant)
        if tenant == request.tenant or len(self._lines[tenant]) / self._weights[tenant] <= most / _weight(request):
            return None
        return self._lines[tenant].last()

    def nth(self, n: int, now: float) -> Waiting | None:
        """The one that is to go after ``n`` others."""
        return next(islice(self._in_order(now), n, None), None)

    def is_pressing(self, waiting: Waiting, now: float) -> bool:
        """It may not be passed over for others of its tenant any more."""
        line = self._lines.get(waiting.request.tenant)
        return line is not None and line.is_pressing(waiting, now)

    def next_due(self, after: float) -> float | None:
        """When the next one gets pressing."""
        dues = (line.next_due(after) for line in self._lines.values())
        return min((due for due in dues if due is not None), default=None)

    def outlook(self, waiting: Waiting, key: float, busy_s: NDArray[np.float64], now: float) -> Outlook:
        """What joining would come to, nobody else arriving. ``busy_s``: [workers] seconds until each is free."""
        tenant = waiting.request.tenant
        if not self._lines.keys() - {tenant}:
            return self._lines.get(tenant, self._new_line()).outlook(waiting, key, busy_s, now)
        free: list[float] = busy_s.tolist()
        if not free:
            return Outlook(0.0)
        here = list(self._in_order(now))
        without = _begun(here, free)
        self.add(waiting, key)
        begun = _begun(self._in_order(now), free)
        self.remove(waiting.request.request)
        return Outlook(begun[waiting.order], delayed(here, begun, without, now))

    def _in_order(self, now: float) -> Iterator[Waiting]:
        if len(self._lines) == 1:
            for alone in self._lines.values():
                yield from alone.in_order(now)
            return
        lines = {tenant: line.in_order(now) for tenant, line in self._lines.items()}
        yield from in_turn(self._clock, lines, lambda one: one.work_s / self._weights[one.request.tenant])

    def _new_line(self) -> WaitingQueue:
        return WaitingQueue(self._limit, self._cap_s)


def _weight(request: PlaceRequest) -> float:
    """A gateway of an older version says nothing of it."""
    return request.weight if request.weight > 0.0 else 1.0


def _begun(order: Iterator[Waiting] | list[Waiting], free_s: list[float]) -> dict[int, float]:
    """When each of ``order`` is begun, in seconds from now, whichever worker is free first taking the next."""
    free = list(free_s)
    heapq.heapify(free)
    begun = {}
    for one in order:
        begun[one.order] = free[0]
        heapq.heapreplace(free, free[0] + one.work_s)
    return begun
