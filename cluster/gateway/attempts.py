"""One request from placement to its last id, over as many attempts as it takes.

How each attempt ended is told once, with the peer that failed it, to whoever judges peers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import structlog

from moonpool.cluster.gateway.conductors import Conductors
from moonpool.cluster.gateway.decode_client import DecodeStreams
from moonpool.cluster.gateway.ledger import Ledger
from moonpool.cluster.gateway.opening import Family, Opened, Opener
from moonpool.core.errors import AttemptFailed, MoonpoolError, Reason, Refused
from moonpool.core.lifetime import Instant, Lifetime, Try
from moonpool.core.placement import Finished, Placement
from moonpool.core.request import Emission

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """One attempt that was placed and came to an end of its own: not one that the client left."""

    placement: Placement
    reason: Reason | None  # why it failed; None: it answered
    peer: str = ""  # who failed it, where that is known


def _nobody(_: AttemptEnded) -> None:
    pass


class Watch(Protocol):
    """Who counts what happens to attempts. Nothing of it raises."""

    def gap(self, seconds: float) -> None:
        """Between an id and the one before it, of whichever attempt. Called for every id."""

    def failed(self, reason: Reason) -> None:
        """An attempt that was placed."""

    def resumed(self) -> None:
        """Another attempt begins after ids were streamed."""

    def predicted(self, of: str, actual_s: float, predicted_s: float) -> None:
        """``of``: ttft or tbt, of an attempt that answered."""


class Unwatched:
    def gap(self, seconds: float) -> None:
        pass

    def failed(self, reason: Reason) -> None:
        pass

    def resumed(self) -> None:
        pass

    def predicted(self, of: str, actual_s: float, predicted_s: float) -> None:
        pass


class Attempts:
    """Iterate ``emissions`` under ``contextlib.aclosing``: leaving it cancels the attempt and reports it.

    ``stopped`` tells it that the answer ended by a stop string: an end, not a cancellation.
    """

    def __init__(
        self,
        ledger: Ledger,
        lifetime: Lifetime,
        conductors: Conductors,
        streams: DecodeStreams,
        *,
        on_ended: Callable[[AttemptEnded], None] = _nobody,
        family: Family | None = None,
    ) -> None:
        """``on_ended`` hears of every attempt, on the event loop, before the next one is placed. ``family``: with whom it makes
        them until it has an id."""
        self._ledger = ledger
        self._lifetime = lifetime
        self._conductors = conductors
        self._opener = Opener(conductors, streams)
        self._family = family
        self._on_ended = on_ended
        self._now = asyncio.get_running_loop().time
        self.stopped = False
        self.watch: Watch = Unwatched()
        self.arrivals: list[float] = []  # of ids, of all attempts

    async def emissions(self) -> AsyncGenerator[Emission, None]:
        """Accepted emissions in order, across attempts, until the one with ``finish``.

        Raises the error that ends the request: a refusal, a failure no further attempt may mend, DeadlinePassed.
        """
        try:
            async with aclosing(self._tries()) as tries:
                async for emission in tries:
                    yield emission
        finally:
            self._leave_family()

    async def _tries(self) -> AsyncGenerator[Emission, None]:
        ledger = self._ledger
        while ledger.finish is None:
            ledger.next_attempt(self._now())
            asked = self._now()
            one = self._lifetime.begin_try(ledger.number, asked)
            if ledger.emitted:
                self.watch.resumed()
            try:
                opened = await (self._family.open(ledger) if self._family is not None else self._open())
                self._lifetime.stamp(Instant.PLACED, self._now())
                one.facts |= {"prefill": opened.placement.prefill.id, "decode": opened.placement.decode.id}
                trial = _Trial(self, opened, asked, one)
                async with aclosing(trial.emissions()) as accepted:
                    async for emission in accepted:
                        yield emission
            except Refused as e:
                self._not_answered(one, e)
                ledger.no_path(e)
            except AttemptFailed as e:
                self._not_answered(one, e)
                ledger.failed(e)
            finally:
                one.ended = self._now()
                one.facts.setdefault("outcome", Reason.CANCELLED.value)
            if ledger.finish is None:
                await self._pause()

    async def _open(self) -> Opened:
        (opened,) = await self._opener.open([self._ledger])
        return opened

    def _leave_family(self) -> None:
        """It has an id, or is over."""
        if self._family is not None:
            self._family.leave(self._ledger)
            self._family = None

    def _not_answered(self, one: Try, error: Refused | AttemptFailed) -> None:
        peer = error.peer if isinstance(error, AttemptFailed) else None
        one.facts |= {"outcome": error.reason.value} | ({"peer": peer} if peer else {})
        _log.info(
            "attempt failed",
            request=self._ledger.request.id,
            attempt=one.number,
            streamed=len(self._ledger.emitted),
            message=error.message,
            **one.facts,
        )

    async def _pause(self) -> None:
        seconds = self._ledger.pause_s(random.random())
        if seconds > 0:
            await asyncio.sleep(min(seconds, max(self._ledger.deadline - self._now(), 0.0)))


class _Trial:
    """One attempt: what was measured in it, and its report to the conductor that placed it."""

    def __init__(self, of: Attempts, opened: Opened, asked: float, one: Try) -> None:
        self._of = of
        self._ledger = of._ledger
        self._opened = opened
        self._placement = opened.placement
        self._asked = asked
        self._placed = of._now()
        self._before = len(of.arrivals)  # ids of earlier attempts
        self._one = one
        self._cached = 0

    async def emissions(self) -> AsyncGenerator[Emission, None]:
        outcome = Reason.CANCELLED.value
        try:
            if isinstance(self._opened.line, MoonpoolError):
                raise self._opened.line
            self._of._lifetime.stamp(Instant.ADMITTED, self._of._now())
            async with aclosing(self._opened.line.emissions()) as run:
                async for emission in self._until_deadline(run):
                    if self._ledger.accept(emission):
                        self._note(emission)
                        yield emission
            outcome = "ok"
        except MoonpoolError as e:
            outcome = e.reason.value
            self._tell(e)
            raise
        finally:
            if self._of.stopped:
                outcome = "ok"
            if outcome == "ok":
                self._tell(None)
            self._report(outcome)

    async def _until_deadline(self, run: AsyncGenerator[Emission, None]) -> AsyncGenerator[Emission, None]:
        while True:
            try:
                async with asyncio.timeout_at(self._ledger.deadline):
                    emission = await anext(run)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._ledger.out_of_time() from None
            yield emission

    def _tell(self, error: MoonpoolError | None) -> None:
        if not self._opened.first and len(self._of.arrivals) == self._before:
            return  # the first choice of the prompt speaks for all
        if error is not None:
            self._of.watch.failed(error.reason)
        peer = error.peer or "" if isinstance(error, AttemptFailed) else ""
        self._of._on_ended(AttemptEnded(self._placement, error.reason if error is not None else None, peer))

    def _note(self, emission: Emission) -> None:
        now, arrivals = self._of._now(), self._of.arrivals
        if emission.sampled is not None or emission.finish is not None:
            self._of._leave_family()
        if emission.sampled is not None:
            self._of._lifetime.stamp(Instant.FIRST_TOKEN, now)
            if arrivals:
                self._of.watch.gap(now - arrivals[-1])
            arrivals.append(now)
        if len(arrivals) == self._before + 1:
            self._cached = emission.cached_tokens

    def _report(self, outcome: str) -> None:
        arrivals = self._of.arrivals[self._before :]
        self._one.facts |= {"outcome": outcome, "output_tokens": len(arrivals), "cached_tokens": self._cached}
        finished = Finished(
            request=self._ledger.request.id,
            attempt=self._ledger.number,
            booking=self._placement.booking if self._opened.first else 0,
            ttft_ms=(arrivals[0] - self._asked) * 1000 if arrivals else 0.0,
            tbt_ms=slowest_tenth(arrivals) * 1000,
            output_tokens=len(arrivals),
            cached_tokens=self._cached,
            outcome=outcome,
        )
        self._of._conductors.tell(self._opened.conductor, finished)
        if outcome == "ok" and arrivals and self._opened.first:
            self._of.watch.predicted("ttft", arrivals[0] - self._placed, self._placement.predicted_ttft_ms / 1e3)
            self._of.watch.predicted("tbt", finished.tbt_ms / 1e3, self._placement.predicted_tbt_ms / 1e3)


def slowest_tenth(arrivals: list[float]) -> float:
    """TBT of one answer in seconds: the mean of the slowest tenth of its gaps (at least one); 0 without gaps."""
    gaps = sorted((b - a for a, b in pairwise(arrivals)), reverse=True)
    worst = gaps[: max(1, len(gaps) // 10)]
    return sum(worst) / len(worst) if worst else 0.0
