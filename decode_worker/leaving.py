"""A decode worker that leaves: what can be finished is finished, the rest is handed over with its blocks in the pool.

A sequence that is handed over ends here with the reason ``moved``. Its gateway goes on with it elsewhere, where the blocks
that were published while it ran are fetched instead of computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from moonpool.core.ids import RequestId
from moonpool.decode_worker.live import Live
from moonpool.decode_worker.sequence import Phase

LOOK_S = 0.05
MEASURE_S = 0.5  # of decoding, before anybody is called too slow
FLUSH_S = 2.0  # for blocks that are complete to reach the pool
QUIET_S = 0.3  # empty for so long: what was placed before readiness ended has come and was sent on


class Leaver(Protocol):
    """The worker, as far as leaving goes."""

    def held(self) -> list[Live]:
        """Every attempt there is."""

    def publishing(self) -> int:
        """Complete blocks that are not in the pool yet."""

    def others(self) -> bool:
        """Somebody else takes what is given back now."""

    def give_back(self, live: Live) -> None:
        """End it with ``moved``."""


async def leave(worker: Leaver, limit_s: float) -> None:
    """The worker admits nothing any more. Returns once it is empty, ``FLUSH_S`` after ``limit_s`` at the latest."""
    now = time.monotonic()
    end, since, quiet_since = now + limit_s, now, now
    speeds = _positions(worker.held())
    while (now := time.monotonic()) < end:
        held = worker.held()
        if held:
            quiet_since = now
        elif now - quiet_since >= QUIET_S:
            return
        if held and worker.others():
            late = [live for live in held if live.waits]
            if now - since >= MEASURE_S:
                late += too_slow(held, speeds, now - since, end - now)
                since, speeds = now, _positions(held)
            await _give_back(worker, late)
        await asyncio.sleep(LOOK_S)
    await _give_back(worker, worker.held())


def too_slow(held: Iterable[Live], before: Mapping[RequestId, int], elapsed_s: float, left_s: float) -> list[Live]:
    """Running attempts that, as fast as they were in the last ``elapsed_s``, do not end within ``left_s``. Pure.

    ``before``: the position of each one that ran already, ``elapsed_s`` ago. An attempt may always end early; this is about
    those that need not.
    """
    late = []
    for live in held:
        start = before.get(live.request)
        if start is None or live.sequence.phase is not Phase.RUNNING:
            continue
        made = live.position - start
        if made <= 0 or live.possible * elapsed_s > made * left_s:
            late.append(live)
    return late


def _positions(held: Iterable[Live]) -> dict[RequestId, int]:
    return {live.request: live.position for live in held if live.sequence.phase is Phase.RUNNING}


async def _give_back(worker: Leaver, late: list[Live]) -> None:
    """Once what they computed is in the pool, as far as that does not take long."""
    end = time.monotonic() + FLUSH_S
    while late and worker.publishing() and time.monotonic() < end:  # noqa: ASYNC110  no event says that the pool has it all
        await asyncio.sleep(LOOK_S)
    for live in late:
        if not live.over:
            worker.give_back(live)
