"""A prefill worker that leaves: what can be finished is finished, the rest is given back to be placed elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

from moonpool.prefill_worker.chunk_planner import JobKey

LOOK_S = 0.05
QUIET_S = 0.3  # empty for so long: what was placed before readiness ended has come and was sent on


class Leaver(Protocol):
    """The worker, as far as leaving goes."""

    def held(self) -> list[JobKey]:
        """Every job there is."""

    def work_left(self, now: float) -> tuple[float, list[tuple[JobKey, float]]]:
        """Predicted seconds of the job that computes, and of each one that waits, in their order."""

    def others(self) -> bool:
        """Somebody else takes what is given back now."""

    def give_back(self, job: JobKey) -> None:
        """Fail it with ``moved``; a no-op once it has ended."""


async def leave(worker: Leaver, limit_s: float) -> None:
    """The worker takes nothing any more. What waits behind more work than there is time for is given back at once."""
    quiet_since = time.monotonic()
    end = quiet_since + limit_s
    while (now := time.monotonic()) < end:
        if worker.held():
            quiet_since = now
        elif now - quiet_since >= QUIET_S:
            return
        if worker.others():
            for job in too_late(*worker.work_left(now), end - now):
                worker.give_back(job)
        await asyncio.sleep(LOOK_S)
    for job in worker.held():
        worker.give_back(job)


def too_late(running_s: float, waiting: Iterable[tuple[JobKey, float]], left_s: float) -> list[JobKey]:
    """Of the jobs that wait, those that would not be done within ``left_s``. Pure."""
    late = []
    for job, work_s in waiting:
        if running_s + work_s > left_s:
            late.append(job)  # a shorter one behind it may still make it
        else:
            running_s += work_s
    return late
