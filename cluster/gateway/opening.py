"""Attempts placed and begun at a decode worker: one request's, or those of all choices of one prompt at once.

Choices of one prompt make their attempts together for as long as they have no id, so that the prompt is computed once. After
that each is by itself, and goes on by itself after a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonpool.cluster.gateway.conductors import Conductors
from moonpool.cluster.gateway.decode_client import DecodeStreams, Line
from moonpool.cluster.gateway.ledger import Ledger
from moonpool.core.errors import Bug, MoonpoolError
from moonpool.core.placement import Placement
from moonpool.core.request import Sibling


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt that was placed: what comes of it, or why it could not begin. ``first``: the booking is its own."""

    placement: Placement
    conductor: str
    first: bool
    line: Line | MoonpoolError

    def close(self) -> None:
        """Nobody reads it."""
        if isinstance(self.line, Line):
            self.line.close()


class Opener:
    def __init__(self, conductors: Conductors, streams: DecodeStreams) -> None:
        self._conductors = conductors
        self._streams = streams
        self._now = asyncio.get_running_loop().time

    async def open(self, ledgers: Sequence[Ledger]) -> list[Opened]:
        """The current attempts of ``ledgers``, as one: they differ in names and seeds only. Raises what placing raises."""
        first = ledgers[0]
        wanted = replace(first.place_request(), choices=len(ledgers))
        placement, conductor = await self._conductors.place(wanted, deadline=first.deadline)
        try:
            lines: Sequence[Line | MoonpoolError] = await self._begin(ledgers, placement)
        except MoonpoolError as e:
            lines = [e] * len(ledgers)
        return [Opened(placement, conductor, one is first, line) for one, line in zip(ledgers, lines, strict=True)]

    async def _begin(self, ledgers: Sequence[Ledger], placement: Placement) -> list[Line]:
        stream = self._streams.to(placement.decode)
        attempts = [one.attempt(self._now()) for one in ledgers]
        siblings = tuple(Sibling(one.request.id, one.number, one.request.sampling.seed) for one in attempts[1:])
        lines = [stream.line(attempt) for attempt in attempts]
        try:
            async with asyncio.timeout_at(ledgers[0].deadline):
                await stream.start(replace(attempts[0], siblings=siblings), placement)
        except BaseException as e:
            for line in lines:
                line.close()
            if isinstance(e, TimeoutError):
                raise ledgers[0].out_of_time() from None
            raise
        return lines


class Family:
    """The choices of one prompt that have no id yet, each with its ledger."""

    def __init__(self, opener: Opener, members: Sequence[Ledger]) -> None:
        self._opener = opener
        self._members = list(members)
        self._waiting: dict[Ledger, asyncio.Future[Opened | Exception]] = {}
        self._opening: asyncio.Task[None] | None = None

    async def open(self, member: Ledger) -> Opened:
        """Its part of the attempt that begins once every member is here. Raises what placing raises."""
        seat: asyncio.Future[Opened | Exception] = asyncio.get_running_loop().create_future()
        self._waiting[member] = seat
        self._go_on()
        try:
            got = await seat
        except asyncio.CancelledError:
            if seat.done() and not seat.cancelled() and isinstance(opened := seat.result(), Opened):
                opened.close()
            raise
        finally:
            self._waiting.pop(member, None)
        if isinstance(got, Exception):
            raise got
        return got

    def leave(self, member: Ledger) -> None:
        """It has an id, or is over: the others wait for it no more. A no-op the second time."""
        if member not in self._members:
            return
        self._members.remove(member)
        if self._members:
            self._go_on()
        elif self._opening is not None:
            self._opening.cancel()

    def _go_on(self) -> None:
        if self._opening is None and all(member in self._waiting for member in self._members):
            seats = {member: self._waiting.pop(member) for member in self._members}
            self._opening = asyncio.create_task(self._open(seats))

    async def _open(self, seats: dict[Ledger, asyncio.Future[Opened | Exception]]) -> None:
        results: Sequence[Opened | Exception]
        try:
            results = await self._opener.open(list(seats))
        except asyncio.CancelledError:
            self._tell(seats, [Bug("a call that the answer came by was ended from outside")] * len(seats))
            raise
        except Exception as e:  # noqa: BLE001  each of them raises it
            results = [e] * len(seats)
        self._tell(seats, results)

    def _tell(self, seats: dict[Ledger, asyncio.Future[Opened | Exception]], results: Sequence[Opened | Exception]) -> None:
        self._opening = None
        for seat, result in zip(seats.values(), results, strict=True):
            if not seat.done():
                seat.set_result(result)
            elif isinstance(result, Opened):  # it left meanwhile
                result.close()
