"""The node's carrier endpoints for writers of other nodes: polled while they may push, ended as a proof.

Making them anew proves that nothing posted before can land any more, so what was fenced before is free afterwards.
Where every carrier can cut off a single writer, that is the proof for this writer's slots, and nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from moonpool.core.errors import ConfigError
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life, Reach
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.transfer.carrier import Endpoint, Receiver
from moonpool.kvstore.transfer.choose import nothing_shared

REMAKE_PAUSE_S = 1.0  # between two automatic remakes: each one disconnects every healthy sender
log = structlog.get_logger(__name__)


class Receiving:
    """Event-loop only. ``receivers``, best first, are none where only mapped segments are wanted.

    One number counts the lives of all of them together: the generation.
    """

    def __init__(self, member: Member, pool: Pool, clock: Callable[[], float]) -> None:
        self._member = member
        self._pool = pool
        self._clock = clock
        self.receivers: tuple[Receiver, ...] = ()
        self.files: tuple[Region, ...] = ()
        self.remakes = 0
        self.cuts = 0
        self.opened = 0  # how often the receivers were opened and not yet idled
        self.generation = 1
        self._remaking = asyncio.Lock()
        self._remade_at = float("-inf")

    @property
    def carriers(self) -> tuple[str, ...]:
        return tuple(receiver.carrier for receiver in self.receivers)

    async def endpoint(self, carriers: Sequence[str] = (), writer: Life | None = None) -> Endpoint:
        """The current life for ``writer`` (while it is made anew, the next one), by the first of ``carriers`` that is here.

        Without ``carriers`` the best one is meant. ConfigError, naming both lists, where none of them is here.
        """
        async with self._remaking:
            return self._describe(carriers, writer)

    async def endpoints(self, writer: Life) -> list[Endpoint]:
        """Of every carrier, best first."""
        async with self._remaking:
            return [self._of(receiver, writer) for receiver in self.receivers] or [self._segment()]

    def _describe(self, carriers: Sequence[str], writer: Life | None) -> Endpoint:
        for carrier in carriers or (*self.carriers, "segment"):
            for receiver in self.receivers:
                if receiver.carrier == carrier:
                    return self._of(receiver, writer)
            if carrier == "segment":
                return self._segment()
        raise self._not_here(carriers)

    def _not_here(self, carriers: Sequence[str]) -> ConfigError:
        return nothing_shared(carriers, self.carriers, self._member.node)

    def _of(self, receiver: Receiver, writer: Life | None) -> Endpoint:
        return replace(receiver.describe(writer), generation=self.generation)

    def _segment(self) -> Endpoint:
        me = self._member
        return Endpoint(me.node, me.incarnation, self.generation, "segment", "", b"", (), self.files)

    async def remake(self) -> Endpoint:
        """Returns the new life; slots that remote writers had to leave fenced before are free."""
        async with self._remaking:
            await self._remake()
            return self._describe((), None)

    async def free_for_room(self) -> bool:
        """End what still holds fenced slots: single writers where that is possible, else, but not too often, everybody.

        Whether it is worth trying for slots again.
        """
        if not self._pool.waiting_for_remake and not self._remaking.locked():
            return False
        async with self._remaking:
            waiting = self._pool.waiting_for_remake
            if not waiting:
                return True  # somebody else's remake freed them
            if await self._cut_fenced():
                return True
            if self._clock() - self._remade_at < REMAKE_PAUSE_S:
                return False
            log.info("endpoint_remade_for_room", slots=waiting)
            await self._remake()
            return True

    async def _remake(self) -> None:
        fenced = self._pool.fenced_remote()  # not what is fenced meanwhile: its writer may know the new life already
        await asyncio.gather(*(receiver.remake() for receiver in self.receivers))
        self.generation += 1
        self._remade_at = self._clock()
        self.remakes += 1
        self._pool.endpoint_remade(fenced, self._clock())

    async def _cut_fenced(self) -> bool:
        """Cut off every writer of a fenced landing. False where one could not be: then nothing was freed."""
        fenced = self._pool.fenced_remote()
        claims = [claim for number in fenced if (claim := self._pool.landings.get(number)) is not None]
        for writer in {claim.ask.writer for claim in claims}:
            if not await self.cut(writer):
                return False
        self._pool.endpoint_remade(fenced, self._clock())
        return True

    async def cut(self, writer: Life) -> bool:
        """Whether nothing that ``writer`` posted before can land any more. A healthy one connects again."""
        ends = [await receiver.cut(writer) for receiver in self.receivers]
        done = bool(ends) and all(ends)
        self.cuts += done
        return done

    def poll_as_needed(self, frozen: Callable[[Life], bool]) -> None:
        """Open once for every landing that may be filled through a carrier, unless it is ``frozen``: then nothing comes."""
        if not self.receivers:
            return
        wanted = sum(
            c.ask.reach is not Reach.MAPPED and c.writer_open and not frozen(c.ask.writer) for c in self._pool.landings
        )
        for receiver in self.receivers:
            for _ in range(wanted - self.opened):
                receiver.open()
            for _ in range(self.opened - wanted):
                receiver.idle()
        self.opened = wanted

    def numbers(self) -> dict[str, float]:
        own: dict[str, float] = {
            "endpoint_remakes": self.remakes,
            "endpoint_generation": self.generation,
            "writers_cut": self.cuts,
            "receiver_open": self.opened,
        }
        for receiver in self.receivers:
            own |= receiver.numbers()
        return own

    def words(self) -> dict[str, str]:
        """What is offered, and what UCX really uses."""
        out = {"carrier": ", ".join(self.carriers) or "segment"}
        for receiver in self.receivers:
            if receiver.carrier in ("ucx", "ucxx"):
                out["ucx_transport"] = receiver.transport_used()
        return out

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(receiver.close) for receiver in self.receivers))
