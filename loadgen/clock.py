"""Time as the replay sees it: seconds on a monotonic clock. Tests hand in one of their own."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """At least ``seconds`` (0: let other tasks run)."""


class MonotonicClock:
    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
