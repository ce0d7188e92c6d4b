"""Calls of ``Place`` that are told to wait: open until the conductor binds their requests, or their callers leave."""

from __future__ import annotations

import asyncio

from moonpool.core.errors import NoPath
from moonpool.core.placement import Placement, Refusal
from moonpool.scheduler.actions import Bound

LEAVING_RETRY_S = 0.1


class LateAnswers:
    """One open call per request: a newer one of the same request ends the older. Event-loop only."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, asyncio.Future[Placement | Refusal]]] = {}
        self.unclaimed = 0  # answers that came after their callers had left

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: str, attempt: int) -> asyncio.Future[Placement | Refusal]:
        """To be awaited, and closed whatever comes of it."""
        self._end(request, NoPath(f"conductor: {request} is asked for anew", retry_after_s=LEAVING_RETRY_S))
        answer: asyncio.Future[Placement | Refusal] = asyncio.get_running_loop().create_future()
        self._open[request] = (attempt, answer)
        return answer

    def bound(self, action: Bound) -> bool:
        """False: nobody waits for this answer any more."""
        attempt, answer = self._open.get(action.request, (0, None))
        if answer is None or attempt != action.attempt or answer.done():
            self.unclaimed += 1
            return False
        answer.set_result(action.answer)
        return True

    def close(self, request: str, answer: asyncio.Future[Placement | Refusal]) -> bool:
        """Whether ``answer`` was still the newest of its request."""
        newest = self._open.get(request, (0, None))[1] is answer
        if newest:
            del self._open[request]
        answer.cancel()
        return newest

    def end_all(self) -> None:
        """The conductor leaves: whoever waits asks another one."""
        for request in list(self._open):
            self._end(request, NoPath("conductor: leaving", retry_after_s=LEAVING_RETRY_S))

    def _end(self, request: str, error: NoPath) -> None:
        _, answer = self._open.get(request, (0, None))
        if answer is not None and not answer.done():
            answer.set_exception(error)
