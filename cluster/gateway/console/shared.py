"""Answers that many consoles share: however many ask, the cluster is asked once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from moonpool.core.errors import Overloaded

Make = Callable[[], Awaitable[bytes]]
SLOWER = 4.0  # times what an answer took passes before the next one is made: consoles never take more than a fifth


class SharedAnswer:
    """One answer, made by one call of ``make`` at a time and no more often than every ``fresh_s``. One event loop."""

    def __init__(self, make: Make, fresh_s: float) -> None:
        self._make, self._fresh_s = make, fresh_s
        self._now = asyncio.get_running_loop().time
        self._answer: asyncio.Future[bytes] | None = None
        self._next = 0.0  # when a newer one may be made
        self.made = 0

    async def get(self) -> bytes:
        """Raises what ``make`` raised, too, until the next one may be made."""
        if self._answer is None or (self._answer.done() and self._now() >= self._next):
            self._answer = asyncio.ensure_future(self._timed())
        return await asyncio.shield(self._answer)  # who leaves must not end it for the others

    async def _timed(self) -> bytes:
        begun, self.made = self._now(), self.made + 1
        try:
            return await self._make()
        finally:
            spent = self._now() - begun
            self._next = self._now() + max(self._fresh_s, SLOWER * spent)

    async def close(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            await asyncio.gather(self._answer, return_exceptions=True)


class SharedAnswers:
    """By name; the ``kept`` newest ones, of which ``at_once`` may be in the making. One event loop."""

    def __init__(self, make: Callable[[str], Awaitable[bytes]], fresh_s: float, *, kept: int = 64, at_once: int = 4) -> None:
        self._make, self._fresh_s, self._kept, self._at_once = make, fresh_s, kept, at_once
        self._answers: OrderedDict[str, SharedAnswer] = OrderedDict()
        self._making = 0

    async def get(self, name: str) -> bytes:
        """Overloaded where too many others are in the making."""
        if name not in self._answers:
            self._answers[name] = SharedAnswer(lambda: self._counted(name), self._fresh_s)
            while len(self._answers) > self._kept:
                self._answers.popitem(last=False)
        self._answers.move_to_end(name)
        return await self._answers[name].get()

    async def _counted(self, name: str) -> bytes:
        if self._making >= self._at_once:
            raise Overloaded("console: other requests are being looked up; try again", retry_after_s=1.0)
        self._making += 1
        try:
            return await self._make(name)
        finally:
            self._making -= 1

    async def close(self) -> None:
        answers = list(self._answers.values())
        self._answers.clear()
        for answer in answers:
            await answer.close()
