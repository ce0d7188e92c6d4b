"""All choices of one HTTP request, running side by side; their pieces come out in the order they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from moonpool.cluster.gateway.attempts import Attempts
from moonpool.cluster.gateway.choice import Choice, Piece
from moonpool.cluster.gateway.ledger import Ledger
from moonpool.cluster.gateway.shapes import Usage
from moonpool.core.errors import Bug, MoonpoolError
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.wire.status import being_cancelled

_AHEAD = 64  # pieces a slow reader may lag behind before its choices stop being drained


class Run:
    """One choice: its book, its text, its instants."""

    def __init__(self, ledger: Ledger, choice: Choice, lifetime: Lifetime, attempts: Attempts) -> None:
        self.ledger = ledger
        self.choice = choice
        self.lifetime = lifetime
        self.attempts = attempts

    @property
    def usage(self) -> Usage:
        return Usage(len(self.ledger.request.prompt), self.choice.tokens, self.ledger.cached_tokens)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async with aclosing(self.attempts.emissions()) as emissions:
            async for emission in emissions:
                piece = self.choice.push(emission.sampled, emission.finish)
                if piece.finish is not None:
                    self.attempts.stopped = True
                yield piece
                if piece.finish is not None:
                    return


class Generation:
    """Iterate ``pieces`` under ``contextlib.aclosing``; leaving it cancels every choice still running."""

    def __init__(self, runs: Sequence[Run], now: Callable[[], float]) -> None:
        self.runs = runs
        self._now = now
        self._queue: asyncio.Queue[tuple[int, Piece] | MoonpoolError] = asyncio.Queue(_AHEAD)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        """Of all choices together: every prompt counted once."""
        return Usage.total([run.usage for run in self.runs])

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, piece) until every choice has finished; raises the first error of any of them."""
        self._tasks = [asyncio.create_task(self._drive(index, run)) for index, run in enumerate(self.runs)]
        open_choices = len(self.runs)
        try:
            while open_choices:
                item = await self._queue.get()
                if isinstance(item, MoonpoolError):
                    raise item
                open_choices -= item[1].finish is not None
                yield item
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drive(self, index: int, run: Run) -> None:
        try:
            async with aclosing(run.pieces()) as pieces:
                async for piece in pieces:
                    await self._queue.put((index, piece))
            run.lifetime.stamp(Instant.FINISHED, self._now())
        except asyncio.CancelledError:
            if not being_cancelled():  # a call was ended under it, and the reader must hear of it
                await self._queue.put(Bug("a call that the answer came by was ended from outside"))
            raise
        except MoonpoolError as e:
            await self._queue.put(e)
        except Exception as e:  # noqa: BLE001  the reader must hear of it, or it waits for ever
            await self._queue.put(Bug(f"{type(e).__name__}: {e}"))

    def end(self, error: MoonpoolError) -> None:
        """Stop all choices; the reader gets ``error`` after the pieces it already has."""
        for task in self._tasks:
            task.cancel()
        if self._queue.full():
            self._queue.get_nowait()  # a reader that far behind loses one piece; an error follows it, so nothing looks whole
        self._queue.put_nowait(error)
