"""Fair shares of one resource among tenants: whose turn it is, by what each was served so far.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) over costs known beforehand; "Fairness in Serving Large Language Models"
(Sheng et al., OSDI 2024) does the same with tokens. A tenant's virtual time grows by cost over weight with everything it
is served, and the smallest virtual time goes next. Who was away comes back at the time of what is being served: it is owed
nothing for what it did not ask for, so it cannot starve the others afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
KEPT = 4_096  # tenants remembered; those that are owed nothing and owe nothing go first


class FairClock:
    """Costs in any one unit; weights above 0."""

    def __init__(self) -> None:
        self._now = 0.0  # virtual time at which what was served last began
        self._times: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._times)

    def time(self, tenant: str) -> float:
        """Its virtual time, of one that has joined: of those that want a turn the smallest goes next."""
        return self._times.get(tenant, self._now)

    def join(self, tenant: str) -> None:
        """It wants something again, and nothing is owed to it for the time that it did not."""
        self._times[tenant] = max(self.time(tenant), self._now)
        if len(self._times) > KEPT:
            self._forget()

    def serve(self, tenant: str, cost: float, weight: float = 1.0) -> None:
        """It has its turn, which takes ``cost``."""
        begin = self.time(tenant)
        self._now = max(self._now, begin)
        self._times[tenant] = begin + cost / weight
        if len(self._times) > KEPT:
            self._forget()

    def _forget(self) -> None:
        del self._times[min(self._times, key=self._times.__getitem__)]


def in_turn(clock: FairClock, lines: Mapping[str, Iterable[T]], share: Callable[[T], float]) -> Iterator[T]:
    """What the tenants' ``lines`` hold in the order in which it would be served if nothing else came. ``share`` of one is its
    cost over its tenant's weight. Of equal turns that of the earlier line goes first."""
    turns: list[tuple[float, int]] = []
    left = [(clock.time(tenant), iter(line)) for tenant, line in lines.items()]
    heads: list[T | None] = []
    for place, (at, line) in enumerate(left):
        heads.append(next(line, None))
        if heads[place] is not None:
            heapq.heappush(turns, (at, place))
    while turns:
        at, place = heapq.heappop(turns)
        one = heads[place]
        assert one is not None
        yield one
        heads[place] = next(left[place][1], None)
        if heads[place] is not None:
            heapq.heappush(turns, (at + share(one), place))
