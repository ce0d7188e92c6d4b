"""The node's carrier endpoint for writers of other nodes: polled while they may push, made anew as a proof.

Making it anew proves that nothing posted before can land any more, so what was fenced before is free afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life, Reach
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.transfer.carrier import Endpoint, Receiver

REMAKE_PAUSE_S = 1.0  # between two automatic remakes: each one disconnects every healthy sender
log = structlog.get_logger(__name__)


class Receiving:
    """Event-loop only. ``receiver`` is None where only mapped segments are wanted; lives are counted all the same."""

    def __init__(self, member: Member, pool: Pool, clock: Callable[[], float]) -> None:
        self._member = member
        self._pool = pool
        self._clock = clock
        self.receiver: Receiver | None = None
        self.files: tuple[Region, ...] = ()
        self.remakes = 0
        self.opened = 0  # how often the receiver was opened and not yet idled
        self._life = 1  # without a receiver
        self._remaking = asyncio.Lock()
        self._remade_at = float("-inf")

    @property
    def generation(self) -> int:
        return self._life if self.receiver is None else self.receiver.describe().generation

    async def endpoint(self) -> Endpoint:
        """The current life; while it is made anew, the next one."""
        async with self._remaking:
            return self._describe()

    def _describe(self) -> Endpoint:
        if self.receiver is not None:
            return self.receiver.describe()
        return Endpoint(self._member.node, self._member.incarnation, self._life, "segment", "", b"", (), self.files)

    async def remake(self) -> Endpoint:
        """Returns the new life; slots that remote writers had to leave fenced before are free."""
        async with self._remaking:
            return await self._remake()

    async def remake_for_room(self) -> bool:
        """Make the endpoint anew if that frees slots, but not too often. Whether it is worth trying for slots again."""
        if not self._pool.waiting_for_remake and not self._remaking.locked():
            return False
        async with self._remaking:
            waiting = self._pool.waiting_for_remake
            if not waiting:
                return True  # somebody else's remake freed them
            if self._clock() - self._remade_at < REMAKE_PAUSE_S:
                return False
            log.info("endpoint_remade_for_room", slots=waiting)
            await self._remake()
            return True

    async def _remake(self) -> Endpoint:
        fenced = self._pool.fenced_remote()  # not what is fenced meanwhile: its writer may know the new life already
        if self.receiver is not None:
            await self.receiver.remake()
        self._life += 1
        self._remade_at = self._clock()
        self.remakes += 1
        self._pool.endpoint_remade(fenced, self._clock())
        return self._describe()

    def poll_as_needed(self, frozen: Callable[[Life], bool]) -> None:
        """Open once for every landing that may be filled through the carrier, unless it is ``frozen``: then nothing comes."""
        if self.receiver is None:
            return
        wanted = sum(
            c.ask.reach is not Reach.MAPPED and c.writer_open and not frozen(c.ask.writer) for c in self._pool.landings
        )
        while self.opened < wanted:
            self.receiver.open()
            self.opened += 1
        while self.opened > wanted:
            self.receiver.idle()
            self.opened -= 1

    async def close(self) -> None:
        if self.receiver is not None:
            await asyncio.to_thread(self.receiver.close)
