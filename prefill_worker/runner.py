"""One job's way from its pages and its landing to its first token: the steps, each bounded, in order.

The event loop owns pages and pins; the compute thread runs the chunks and tells the finished layers; the load thread
brings reused blocks in ahead of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, MoonpoolError, PeerSilent
from moonpool.core.handoff import FirstToken
from moonpool.core.lifetime import Instant
from moonpool.core.membership import LinkTiming, Peers, PrefillTiming
from moonpool.core.request import Sampled
from moonpool.engine.engine import Engine
from moonpool.engine.pages import OutOfPages
from moonpool.kvstore.link import StoreLink
from moonpool.kvstore.pusher import Pusher, PushLanding
from moonpool.prefill_worker.ahead import Ahead, fetch_ahead
from moonpool.prefill_worker.chunk_planner import Chunk, ChunkPlanner
from moonpool.prefill_worker.job import Job, give_up_landing, private_keys
from moonpool.prefill_worker.pace import Pace
from moonpool.prefill_worker.prefix import (
    Found,
    LoadStopped,
    PrefixLoad,
    PrefixLost,
    Wait,
    find,
    quarantine,
)

MAX_TIMINGS = 1_024  # between two reports
MEET_SHARE = 0.25  # of the time of the next chunk that computing waits where a fetch was to meet it
log = logging.getLogger(__name__)


class Runner:
    """Runs one job at a time on one compute thread."""

    def __init__(
        self, engine: Engine, peers: Peers, planner: ChunkPlanner, link: StoreLink, pusher: Pusher, *, reuse: bool
    ) -> None:
        self._engine, self._peers, self._planner, self._link, self._pusher = engine, peers, planner, link, pusher
        self._reuse = reuse
        self.pace = Pace()
        self._compute_thread = ThreadPoolExecutor(1, "compute")
        self._load_thread = ThreadPoolExecutor(1, "prefix load")
        self._late: set[asyncio.Task[Any]] = set()
        self.timings: deque[PrefillTiming] = deque(maxlen=MAX_TIMINGS)
        self.links: deque[LinkTiming] = deque(maxlen=MAX_TIMINGS)
        self.counts: Counter[str] = Counter()

    async def run(self, work: Job) -> None:
        """Ends with the first token told, with the job back in the queue, or with its pages left after it ended."""
        try:
            if await self._begin(work):
                await self._compute(work)
        except Exception as e:
            if not isinstance(e, MoonpoolError):
                log.exception("prefill of %s attempt %d", *work.key)
            work.fail(Failure.of(e))
        finally:
            await self._leave_pages(work)

    async def close(self) -> None:
        """Waits for the layer and the slice under way, and for landings that came too late."""
        await asyncio.to_thread(self._compute_thread.shutdown)
        await asyncio.to_thread(self._load_thread.shutdown)
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _begin(self, work: Job) -> bool:
        """Pages, landing, prefix. False: not now (the job waits on), or it ended."""
        work.taken = time.monotonic()
        work.life.stamp(Instant.PREFILL_BEGUN, work.taken)
        try:
            self._take_pages(work)
            await self._take_landing(work)
        except (OutOfPages, Busy) as e:
            log.info("%s attempt %d waits: %s", *work.key, e)
            self._give_back(work)
            if not work.ended():
                self.counts["skips"] += 1
                self._planner.refused(work.key, time.monotonic())
            return False
        if work.ended():
            return False
        await self._find_prefix(work)
        if work.ended():
            return False
        self._planner.granted(work.key, work.start)
        return True

    def _take_pages(self, work: Job) -> None:
        """The device prefix first; a fully cached prompt gets a private copy of its last page."""
        pool, size = self._engine.pages, self._engine.layout.block_tokens
        matched = pool.match(work.keys) if self._reuse else []
        full = len(matched) * size == len(work.tokens)
        try:
            fresh = pool.allocate(blocks_for(len(work.tokens), size) - len(matched) + full)
        except OutOfPages:
            pool.release(matched)
            raise
        if full:
            shared = matched.pop()
            self._engine.copy_page(shared, fresh[0])
            pool.release([shared])
        work.pages = matched + fresh
        work.matched = len(matched) + full
        work.published = len(matched)

    def _give_back(self, work: Job) -> None:
        pages, work.pages = work.pages, []
        self._engine.pages.release(pages)

    async def _take_landing(self, work: Job) -> None:
        """Ask the decode host's store node. Busy: not now."""
        job = work.job
        store = self._peers.store_of(job.store_node)
        if store is None:
            raise PeerSilent(f"no store node is live on {job.store_node}, where {job.decode.id} reads")
        work.store = store.id
        first = job.have_blocks
        keys = work.keys if self._reuse else private_keys(work.key, len(work.keys))
        granting = asyncio.create_task(
            self._pusher.grant(
                store,
                job.attempt,
                keys[first:],
                first_block=first,
                tail_valid=work.tail_valid,
                reader=job.decode.id,
                reader_incarnation=job.decode.incarnation,
                parent=keys[first - 1] if first else None,
            )
        )
        if not await work.done_or_ended(granting):  # a frozen store node must not hold up the other jobs
            self._late.add(granting)
            granting.add_done_callback(self._granted_too_late)
            return
        landing = granting.result()
        work.landing = landing
        work.life.stamp(Instant.LANDING_GRANTED, time.monotonic())
        work.tell(lambda: work.source.granted(landing.landing))

    def _granted_too_late(self, granting: asyncio.Task[PushLanding]) -> None:
        self._late.discard(granting)
        if not granting.cancelled() and granting.exception() is None:
            self._behind(give_up_landing(granting.result()))

    def _behind(self, work: Coroutine[Any, Any, Any]) -> None:
        """Beside the jobs; ``close`` waits for it."""
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _find_prefix(self, work: Job) -> None:
        """Reusable blocks after the device prefix, pinned, and on their way into the pages."""
        size = self._engine.layout.block_tokens
        begun = time.monotonic()
        if self._reuse:
            left_ms = int(work.job.attempt.deadline_ms - (begun - work.life.at[Instant.QUEUED]) * 1000)
            wait = Wait(self.pace, size, left_ms, work.job.attempt.request.use)
            where = self._link.client, self._link.node, self._peers, work.keys, work.matched, work.job.segments, wait
            work.ahead = fetch_ahead(*where)
            finding = asyncio.create_task(find(*where))
            if not await work.done_or_ended(finding):
                finding.cancel()
                await asyncio.gather(finding, return_exceptions=True)  # it ends its pins
                return
            work.found = finding.result()
        work.load_seconds = time.monotonic() - begun
        blocks = work.matched + len(work.found.slots)
        if not work.found.slots:
            work.life.stamp(Instant.PREFIX_LOADED, time.monotonic())
        elif not work.ended():
            self._load(work, work.matched, work.found)
        work.start = min(blocks * size, len(work.tokens) - 1)

    def _load(self, work: Job, first: int, found: Found, *, skip: int = 0) -> None:
        """Bring the blocks of ``found`` but the first ``skip`` of them into the pages of blocks ``first``.. ."""
        assert found.client is not None
        slots = found.slots[skip:]
        pages = work.pages[first : first + len(slots)]
        load = PrefixLoad(found.client, slots, first, pages, self._engine.kv_bytes, self._engine.layout)
        work.loads.append(load)
        load.start(self._load_thread)

    async def _meet(self, work: Job) -> int | None:
        """Take in what was fetched while blocks before it were computed, once computing has come to it.

        Computing never stops for it but for a moment where the two were to meet. Returns the token before which the next
        chunk ends so that they can.
        """
        ahead, size = work.ahead, self._engine.layout.block_tokens
        if ahead is None:
            return None
        done = self._planner.done(work.key)
        at = done // size
        if at < ahead.first and not ahead.lost:
            return ahead.first * size
        if at == ahead.first and not ahead.fetching.done():
            begun = time.monotonic()
            chunk = self._planner.chunk(work.key)
            await asyncio.wait({ahead.fetching}, timeout=MEET_SHARE * self.pace.seconds(chunk.end - chunk.start))
            work.load_seconds += time.monotonic() - begun
        if ahead.fetching.done() or at >= ahead.end:
            work.ahead = None
            if not ahead.fetching.done():
                self._behind(ahead.drop())
            elif not work.ended():
                self._take_ahead(work, ahead, done)
        return None

    def _take_ahead(self, work: Job, ahead: Ahead, done: int) -> None:
        found, size = ahead.fetching.result(), self._engine.layout.block_tokens
        at = done // size
        until = min((ahead.first + len(found.slots)) * size, len(work.tokens) - 1) if found.slots else done
        self.links.extend(found.links)
        self.counts["fetched_bytes"] += found.fetched_bytes
        used = max(until - done, 0)
        self.counts["fetched_ahead_tokens"] += used
        self.counts["fetched_late_tokens"] += (ahead.end - ahead.first) * size - used
        if not used:
            self._behind(found.close())
            return
        self._load(work, at, found, skip=at - ahead.first)
        work.found.tickets += found.tickets
        work.found.client = found.client
        work.ahead_tokens = used
        self._planner.skip(work.key, until)

    async def _compute(self, work: Job) -> None:
        loop = asyncio.get_running_loop()
        while not work.ended():
            until = await self._meet(work)
            if work.ended():
                return
            chunk = self._planner.chunk(work.key, until)
            try:
                sampled = await loop.run_in_executor(self._compute_thread, work.compute, chunk)
            except LoadStopped:
                return
            except PrefixLost as lost:
                await self._shorten(work, lost.load, lost.blocks)
                continue
            self._planner.computed(work.key, chunk)
            self._publish(work, chunk)
            if sampled is not None:
                self._first_token(work, sampled)
                return

    async def _shorten(self, work: Job, load: PrefixLoad, blocks: int) -> None:
        """A loaded block is bad: it is no longer findable, and everything from it on is computed."""
        self.counts["prefix_blocks_lost"] += load.trusted - blocks
        if load.bad is not None:
            await quarantine(self._link.client, *load.bad)
        for later in work.loads:
            if later.first > load.first:
                later.stop()
                await later.ended()  # its pages are about to be computed
                later.trusted = 0
        load.trusted = blocks
        size = self._engine.layout.block_tokens
        start = min((load.first + blocks) * size, len(work.tokens) - 1)
        lost = self._planner.done(work.key) - start
        from_ahead = min(lost, work.ahead_tokens)
        work.ahead_tokens -= from_ahead
        work.start = min(work.start, start)
        self._planner.restart(work.key, start)

    def _publish(self, work: Job, chunk: Chunk) -> None:
        """Whole blocks, reused ones included: every layer of them is in its page now."""
        if not self._reuse:
            return
        whole = chunk.end // self._engine.layout.block_tokens
        for i in range(work.published, whole):
            self._engine.pages.publish(work.pages[i], work.keys[i], work.keys[i - 1] if i else None)
        work.published = max(work.published, whole)

    def _first_token(self, work: Job, sampled: Sampled) -> None:
        now = time.monotonic()
        size, prompt = self._engine.layout.block_tokens, len(work.job.attempt.request.prompt)
        cached = work.start + work.ahead_tokens
        timing = PrefillTiming(
            len(work.tokens),
            cached,
            now - work.taken,
            work.load_seconds,
            max(cached - work.matched * size, 0),
            work.found.fetch_seconds,
        )
        first = FirstToken(sampled, min(cached, prompt), work.ends_with(sampled.token), timing)
        work.life.stamp(Instant.FIRST_TOKEN, now)
        work.tell(lambda: work.source.sampled(first))
        if not work.ahead_tokens:  # else it was computed in two parts, which no estimate of whole ones should learn from
            self.timings.append(timing)
        self.links.extend(work.found.links)
        self.pace.measured(len(work.tokens) - cached, timing.seconds - timing.load_seconds)
        self.counts["prompt_tokens"] += len(work.tokens)
        self.counts["reused_tokens"] += cached
        self.counts["fetched_bytes"] += work.found.fetched_bytes

    async def _leave_pages(self, work: Job) -> None:
        """Compute and prefix load have left the pages; the next job may start while this one drains."""
        if work.ahead is not None:
            self._behind(work.ahead.drop())
        for load in work.loads:
            if work.ended():
                load.stop()
            await load.ended()
        self._behind(work.found.close())  # beside the next job: the store node may be slow to answer
        if work.ended():
            work.tell(work.source.stopped)
        if work.landing is not None:
            self._planner.leave(work.key)
