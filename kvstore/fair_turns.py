"""Turns at something that few can use at a time: who waits goes by tenant, by what each was given so far."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from moonpool.core.fairness import FairClock


class FairTurns:
    """``at_once`` under way. Within a tenant first come, first served. Event-loop only."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._at_once = at_once
        self._clock = FairClock()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], float]]] = {}

    @property
    def idle(self) -> bool:
        return self._free == self._at_once

    @asynccontextmanager
    async def turn(self, tenant: str, cost: float) -> AsyncIterator[None]:
        """``cost`` in any one unit; it is charged when the turn comes."""
        await self._come(tenant, cost)
        try:
            yield
        finally:
            self._leave()

    async def _come(self, tenant: str, cost: float) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            self._clock.serve(tenant, cost)
            return
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._clock.join(tenant)
        mine = asyncio.get_running_loop().create_future(), cost
        self._waiting[tenant].append(mine)
        try:
            await mine[0]
        except asyncio.CancelledError:
            if mine[0].cancelled():
                if mine in self._waiting.get(tenant, ()):  # else whoever left just now has passed over it
                    self._forget(tenant, mine)
            else:  # its turn had just come
                self._leave()
            raise

    def _forget(self, tenant: str, mine: tuple[asyncio.Future[None], float]) -> None:
        line = self._waiting[tenant]
        line.remove(mine)
        if not line:
            del self._waiting[tenant]

    def _leave(self) -> None:
        self._free += 1
        while self._free and self._waiting:
            tenant = min(self._waiting, key=self._clock.time)
            coming, cost = self._waiting[tenant][0]
            self._forget(tenant, (coming, cost))
            if not coming.done():
                self._free -= 1
                self._clock.serve(tenant, cost)
                coming.set_result(None)
