"""All choices of one HTTP request, running side by side; their pieces come out in the order they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from moonpool.cluster.gateway.attempts import Attempts
from moonpool.cluster.gateway.choice import Choice, Piece
from moonpool.cluster.gateway.ledger import Ledger
from moonpool.cluster.gateway.scored_prompt import ScoredPrompt
from moonpool.cluster.gateway.shapes import Usage
from moonpool.core.errors import Bug, MoonpoolError
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.wire.status import being_cancelled

_AHEAD = 64  # pieces a slow reader may lag behind before its choices stop being drained


class Run:
    """One choice: its book, its text, its instants.

    ``first`` of its prompt: the prompt counts as its own. ``scored``: the prompt's log-probabilities, where they are wanted;
    no choice of the prompt says anything before they are all there.
    """

    def __init__(
        self,
        ledger: Ledger,
        choice: Choice,
        lifetime: Lifetime,
        attempts: Attempts,
        *,
        first: bool = True,
        scored: ScoredPrompt | None = None,
    ) -> None:
        self.ledger = ledger
        self.choice = choice
        self.lifetime = lifetime
        self.attempts = attempts
        self.first = first
        self.scored = scored
        self._logprobs = 0.0

    @property
    def usage(self) -> Usage:
        prompt, cached = (len(self.ledger.request.prompt), self.ledger.cached_tokens) if self.first else (0, 0)
        return Usage(prompt, self.choice.tokens, cached)

    @property
    def begun(self) -> bool:
        """Something came of it."""
        return bool(self.choice.tokens) or self.choice.finish is not None

    @property
    def mean_logprob(self) -> float:
        """Of the ids drawn, as far as they were told with theirs."""
        return self._logprobs / max(self.choice.tokens, 1)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        async with aclosing(self.attempts.emissions()) as emissions:
            async for emission in emissions:
                if self.scored is not None:
                    if emission.prompt_logprobs is not None:
                        self.scored.take(emission.prompt_logprobs)
                        continue
                    await self._prompt_scored(self.scored)
                if emission.sampled is not None:
                    self._logprobs += emission.sampled.logprob or 0.0
                piece = self.choice.push(emission.sampled, emission.finish)
                if piece.finish is not None:
                    self.attempts.stopped = True
                yield piece
                if piece.finish is not None:
                    return

    async def _prompt_scored(self, scored: ScoredPrompt) -> None:
        """Another choice may bring them. DeadlinePassed where nobody does."""
        try:
            async with asyncio.timeout_at(self.ledger.deadline):
                await scored.ready.wait()
        except TimeoutError:
            raise self.ledger.out_of_time() from None


class Generation:
    """Iterate ``pieces`` under ``contextlib.aclosing``; leaving it cancels every choice still running.

    ``runs`` are those of the first prompt, of the second, and so on; of each prompt's the best ``shown`` are the answer.
    """

    def __init__(self, runs: Sequence[Run], now: Callable[[], float], *, shown: int = 1) -> None:
        self.runs = runs
        self.shown = shown
        self._now = now
        self._queue: asyncio.Queue[tuple[int, Piece] | MoonpoolError] = asyncio.Queue(_AHEAD)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def usage(self) -> Usage:
        """Of all choices together: every prompt counted once."""
        return Usage.total([run.usage for run in self.runs])

    @property
    def scored(self) -> bool:
        """Whether prompts are shown with log-probabilities: hundreds of thousands of them may take long to write."""
        return any(run.scored is not None for run in self.runs)

    @property
    def prompts(self) -> list[Run]:
        """The first choice of each prompt."""
        return [run for run in self.runs if run.first]

    def best(self) -> list[int]:
        """The choices to show, once all have ended: in the order of their prompts, the best first where some are left out."""
        drawn = len(self.runs) // max(len(self.prompts), 1)
        chosen: list[int] = []
        for first in range(0, len(self.runs), drawn):
            mine = list(range(first, first + drawn))
            if drawn > self.shown:
                mine.sort(key=lambda index: -self.runs[index].mean_logprob)
            chosen += mine[: self.shown]
        return chosen

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
