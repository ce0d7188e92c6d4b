"""Blocks that a job need not compute: found, pinned, on their way into its pages, and taken in while others are computed.

What is late is computed from the front while it still comes; whichever is first wins, and the other one is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moonpool.core.lifetime import Instant
from moonpool.core.membership import LinkTiming, Peers
from moonpool.engine.engine import Engine
from moonpool.kvstore.link import StoreLink
from moonpool.prefill_worker.ahead import Ahead, fetch_ahead
from moonpool.prefill_worker.chunk_planner import ChunkPlanner
from moonpool.prefill_worker.job import Job
from moonpool.prefill_worker.pace import Arrivals, Pace, patience_s
from moonpool.prefill_worker.prefix import (
    Found,
    Load,
    PrefixLoad,
    Wait,
    find_elsewhere,
    find_here,
    from_elsewhere,
    quarantine,
)

MAX_TIMINGS = 1_024  # between two reports
MEET_SHARE = 0.25  # of the time of the next chunk that computing waits where a fetch was to meet it


class Incoming:
    """For all jobs of one worker, one at a time. Owns the thread that copies blocks into pages."""

    def __init__(
        self,
        engine: Engine,
        peers: Peers,
        planner: ChunkPlanner,
        link: StoreLink,
        pace: Pace,
        counts: Counter[str],
        behind: Callable[[Coroutine[Any, Any, Any]], None],
    ) -> None:
        """``behind`` runs what no job waits for."""
        self._engine, self._peers, self._planner, self._link, self._pace = engine, peers, planner, link, pace
        self._counts, self._behind = counts, behind
        self._size = engine.layout.block_tokens
        self._thread = ThreadPoolExecutor(1, "prefix load")
        self._arrivals = Arrivals()
        self.links: deque[LinkTiming] = deque(maxlen=MAX_TIMINGS)

    async def close(self) -> None:
        """Waits for the slice under way."""
        await asyncio.to_thread(self._thread.shutdown)

    async def find(self, work: Job) -> None:
        """Reusable blocks after the device prefix, pinned, and on their way into the pages; ``work.start`` is set.

        What takes longer than ``patience_s`` is late: computing begins where it should have begun.
        """
        begun = time.monotonic()
        left_ms = int(work.job.attempt.deadline_ms - (begun - work.life.at[Instant.QUEUED]) * 1000)
        wait = Wait(self._pace, self._size, left_ms, work.job.attempt.request.use)
        where = self._link.client, self._link.node, self._peers, work.keys
        if not work.job.helpers:
            work.ahead = fetch_ahead(*where, work.matched, work.job.segments, wait)
        here = asyncio.create_task(find_here(self._link.client, work.keys, work.matched, wait))
        found = await self._or_late(work, here, work.matched, len(work.keys), None)
        if found is not None:
            work.found = found
            found.cut(work.matched, self._engine.pages.quantum)
            if not work.job.helpers:  # else the first of them fetches
                await self._find_elsewhere(work, wait)
            found.cut(work.matched, self._engine.pages.quantum)
        work.load_seconds = time.monotonic() - begun
        blocks = work.matched + len(work.found.slots)
        if work.found.slots and not work.ended():
            self._load(work, work.matched, work.found)
        work.start = min(blocks * self._size, len(work.tokens) - 1)

    async def _find_elsewhere(self, work: Job, wait: Wait) -> None:
        first = work.matched + len(work.found.slots)
        parts = from_elsewhere(work.job.segments, first, len(work.keys))
        if not parts or work.ended():
            return
        size = self._engine.layout.block_bytes
        expected = [self._arrivals.expected_s(node, blocks * size) for node, blocks in parts]
        known = [seconds for seconds in expected if seconds is not None]
        segments = work.job.segments
        run = find_elsewhere(self._link.client, self._link.node, self._peers, work.keys, first, segments, wait)
        end = first + sum(blocks for _, blocks in parts)
        all_known = sum(known) if len(known) == len(expected) else None
        more = await self._or_late(work, asyncio.create_task(run), first, end, all_known)
        if more is not None:
            self._learn(more)
            work.fetched_blocks = len(more.slots)
            work.found.add(more)

    async def _or_late(
        self, work: Job, finding: asyncio.Task[Found], first: int, end: int, expected_s: float | None
    ) -> Found | None:
        """What ``finding`` gives of blocks [first, end); None where it is late, or the job ended meanwhile."""
        limit_s = patience_s(expected_s, self._pace.seconds((end - first) * self._size))
        if await work.done_or_ended(finding, limit_s):
            return finding.result()
        late = Ahead(first, end, finding)
        if work.ended():
            await late.drop()  # it ends its pins
        else:
            self._counts["late_fetches"] += 1
            work.late = late
        return None

    def _learn(self, found: Found) -> None:
        for link in found.links:
            self._arrivals.measured(link.source, link.bytes, link.seconds)

    def _load(self, work: Job, first: int, found: Found, *, skip: int = 0) -> None:
        """Bring the blocks of ``found`` but the first ``skip`` of them into the pages of blocks ``first``.. ."""
        assert found.client is not None
        slots = found.slots[skip:]
        pages = work.pages[first : first + len(slots)]
        load = PrefixLoad(found.client, slots, first, pages, self._engine.view, self._engine.layout)
        work.loads.append(load)
        load.start(self._thread)

    # -- while it computes -------------------------------------------------------------------------------------------

    async def meet(self, work: Job) -> int | None:
        """Take in what came while blocks before it were computed, once computing has come to it.

        Computing never stops for it but for a moment where the two were to meet. Returns the token before which the next
        chunk ends so that they can.
        """
        if (late := work.late) is not None and self._settled(work, late):
            work.late = None
        ahead = work.ahead
        if ahead is None:
            return None
        at = self._planner.done(work.key) // self._size
        if at < ahead.first and not ahead.lost:
            return ahead.first * self._size
        if at == ahead.first and not ahead.fetching.done():
            begun = time.monotonic()
            chunk = self._planner.chunk(work.key)
            await asyncio.wait({ahead.fetching}, timeout=MEET_SHARE * self._pace.seconds(chunk.end - chunk.start))
            work.load_seconds += time.monotonic() - begun
        if self._settled(work, ahead):
            work.ahead = None
        return None

    def _settled(self, work: Job, ahead: Ahead) -> bool:
        """Whether it came, and was taken in as far as it is of use, or computing was first."""
        done = self._planner.done(work.key)
        if not ahead.fetching.done():
            if done // self._size < ahead.end:
                return False
            self._behind(ahead.drop())
        elif not work.ended():
            self._take(work, ahead, done)
        return True

    def _take(self, work: Job, ahead: Ahead, done: int) -> None:
        found, size = ahead.fetching.result(), self._size
        found.cut(ahead.first, self._engine.pages.quantum)
        at = done // size
        until = min((ahead.first + len(found.slots)) * size, len(work.tokens) - 1) if found.slots else done
        self._learn(found)
        self.links.extend(found.links)
        self._counts["fetched_bytes"] += found.fetched_bytes
        used = max(until - done, 0)
        self._counts["fetched_ahead_tokens"] += used
        self._counts["fetched_late_tokens"] += (ahead.end - ahead.first) * size - used
        if not used:
            self._behind(found.close())
            return
        self._load(work, at, found, skip=at - ahead.first)
        work.found.tickets += found.tickets
        work.found.client = found.client
        work.ahead_tokens += used
        self._planner.skip(work.key, until)

    async def shorten(self, work: Job, load: Load, blocks: int) -> None:
        """A loaded block is bad: it is no longer findable, and everything from it on is computed."""
        if load is not work.span:
            self._counts["prefix_blocks_lost"] += load.trusted - blocks
        if load.bad is not None:
            await quarantine(self._link.client, *load.bad)
        for later in work.loads:
            if later.first > load.first:
                later.stop()
                await later.ended()  # its pages are about to be computed
                later.trusted = 0
        load.trusted = blocks
        start = min((load.first + blocks) * self._size, len(work.tokens) - 1)
        lost = self._planner.done(work.key) - start
        from_ahead = min(lost, work.ahead_tokens)
        work.ahead_tokens -= from_ahead
        work.start, work.reused = min(work.start, start), min(work.reused, start)
        self._planner.restart(work.key, start)

    async def leave(self, work: Job) -> None:
        """Nothing comes into the job's pages any more."""
        for coming in (work.late, work.ahead):
            if coming is not None:
                self._behind(coming.drop())
        for load in work.loads:
            if work.ended():
                load.stop()
            await load.ended()
        self._behind(work.found.close())  # beside the next job: the store node may be slow to answer
