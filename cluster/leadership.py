"""A conductor's place in the election: asks the registry whether it leads, and tells everybody when that changes.

Whoever leads acts in the background: copies, prefetches, coolings, changes of roles. Placing needs no leader: all do it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from moonpool.cluster.election import Tenure
from moonpool.cluster.membership import Membership
from moonpool.core.config import TimingConfig

ASKED = 4  # times in ``silent_after_ms``: leases are renewed well before they end
log = structlog.get_logger(__name__)


class Leads(Protocol):
    """What a conductor's parts need to know."""

    def term(self) -> int:
        """In which this conductor leads now; 0: it does not, and must not act."""

    def leader(self) -> str:
        """Who leads, as last heard; empty where nobody is known to."""

    async def close(self) -> None: ...


class Leadership:
    """Implements ``Leads``, on the event loop."""

    def __init__(self, peers: Membership, timing: TimingConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers, self._clock = peers, clock
        self._period_s = timing.silent_after_ms / 1000 / ASKED
        self._tenure = Tenure()
        self._task = asyncio.create_task(self._run(), name="leadership")

    def term(self) -> int:
        return self._tenure.term(self._peers.life, self._clock())

    def leader(self) -> str:
        return self._tenure.leader or ""

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        before = 0
        while True:
            asked_at = self._clock()
            said = await self._peers.lead(self.term())
            if said is not None:
                self._tenure.told(said, asked_at)
            if (term := self.term()) != before:
                log.info("leads" if term else "leads no more", term=term or before, leader=self.leader())
                before = term
            self._peers.say_term(term)
            await asyncio.sleep(self._period_s * random.uniform(0.7, 1.0))


class Alone:
    """The only conductor there is: it leads in term 1."""

    def term(self) -> int:
        return 1

    def leader(self) -> str:
        return ""

    async def close(self) -> None:
        pass
