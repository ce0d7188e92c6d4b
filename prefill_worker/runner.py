"""One job's way from its pages and its landing to its first token: the steps, each bounded, in order.

The event loop owns pages and pins; the compute thread runs the chunks and tells the finished layers; the load thread
brings reused blocks in ahead of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from structlog.contextvars import bound_contextvars

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, MoonpoolError, PeerSilent
from moonpool.core.handoff import FirstToken
from moonpool.core.lifetime import Instant
from moonpool.core.membership import LinkTiming, Member, Peers, PrefillTiming
from moonpool.core.progress import ProgressWatch
from moonpool.core.request import Sampled
from moonpool.engine.engine import Engine
from moonpool.engine.pages import OutOfPages
from moonpool.engine.permit import PromptTurns
from moonpool.kvstore.handoffs.handoffs import Handoffs
from moonpool.kvstore.pusher import Pusher, PushLanding
from moonpool.prefill_worker.chunk_planner import Chunk, ChunkPlanner
from moonpool.prefill_worker.incoming import MAX_TIMINGS, Incoming
from moonpool.prefill_worker.job import Job, give_up_landing, private_keys
from moonpool.prefill_worker.pace import Pace
from moonpool.prefill_worker.prefix import LoadStopped, PrefixLost
from moonpool.prefill_worker.slices import Slices
from moonpool.prefill_worker.spans import Spans

log = logging.getLogger(__name__)


class Runner:
    """Runs one job at a time on one compute thread."""

    def __init__(
        self,
        member: Member,
        engine: Engine,
        peers: Peers,
        planner: ChunkPlanner,
        handoffs: Handoffs,
        pusher: Pusher,
        turns: PromptTurns,
        *,
        reuse: bool,
        stuck_s: float,
    ) -> None:
        self._engine, self._peers, self._planner, self._pusher = engine, peers, planner, pusher
        self._reuse = reuse
        self.pace = Pace()
        self.turns = turns
        self._slices = Slices(engine.layout.layers, planner.chunk_tokens)
        self.watch = ProgressWatch("computing", stuck_s)
        self._compute_thread = ThreadPoolExecutor(1, "compute")
        self._late: set[asyncio.Task[Any]] = set()
        self.timings: deque[PrefillTiming] = deque(maxlen=MAX_TIMINGS)
        self.counts: Counter[str] = Counter()
        self._incoming = Incoming(engine, peers, planner, handoffs.link, self.pace, self.counts, self._behind)
        self._spans = Spans(member, engine.layout, handoffs, self.pace, self.counts)

    @property
    def links(self) -> deque[LinkTiming]:
        """Of fetches since the last report."""
        return self._incoming.links

    async def run(self, work: Job) -> None:
        """Ends with the first token told, with the job back in the queue, or with its pages left after it ended."""
        with bound_contextvars(request=work.key[0], attempt=work.key[1]):
            try:
                if await self._begin(work):
                    await self._compute(work)
            except Exception as e:
                if not isinstance(e, MoonpoolError):
                    log.exception("prefill failed")
                work.fail(Failure.of(e))
            finally:
                await self._leave_pages(work)

    async def close(self) -> None:
        """Waits for the layer and the slice under way, and for landings that came too late."""
        await asyncio.to_thread(self._compute_thread.shutdown)
        self.turns.close()
        await self._incoming.close()
        await self._spans.close()
        await asyncio.gather(*self._late, return_exceptions=True)

    def ask_soon(self, work: Job) -> None:
        """``work`` has come; where it has to wait for another one, the workers before it need not."""
        if work.job.helpers and work.reuses and self._planner.current is not None:
            before = work.keys[: work.job.helpers[-1].until]
            self._spans.ask_soon(work, self._engine.pages.peek(before) if self._reuse else 0)

    async def _begin(self, work: Job) -> bool:
        """Pages, landing, prefix. False: not now (the job waits on), or it ended."""
        work.taken = time.monotonic()
        work.turns = self.turns
        work.went_on = lambda: self.watch.went_on(time.monotonic())
        work.life.stamp(Instant.PREFILL_BEGUN, work.taken)
        try:
            self._take_pages(work)
            await self._take_landing(work)
        except (OutOfPages, Busy) as e:
            log.info("the job waits: %s", e)
            self._give_back(work)
            self._spans.forgo_all()
            if not work.ended():
                self.counts["skips"] += 1
                self._planner.refused(work.key, time.monotonic())
            return False
        if work.ended():
            return False
        if work.asked is not None:
            work.start = work.matched * self._engine.layout.block_tokens
        elif self._reuse and work.reuses:
            await self._incoming.find(work)
        work.reused = work.start
        if work.reuses:
            self._spans.ask(work)
        if work.ended():
            return False
        self._planner.granted(work.key, work.start)
        return True

    def _take_pages(self, work: Job) -> None:
        """The device prefix first; a fully cached prompt gets a private copy of its last page."""
        pool, size = self._engine.pages, self._engine.layout.block_tokens
        matched = pool.match(self._keys_here(work)) if self._reuse and work.reuses else []
        full = len(matched) * size == len(work.tokens)
        try:
            fresh = pool.allocate(blocks_for(len(work.tokens), size) - len(matched) + full)
        except OutOfPages:
            pool.release(matched)
            raise
        if full:
            work.pages = matched + fresh  # go back with the job where the copy fails
            shared = matched.pop()
            self._engine.copy_page(shared, fresh[0])
            pool.release([shared])
        work.pages = matched + fresh
        work.matched = len(matched) + full
        work.published = len(matched)

    def _keys_here(self, work: Job) -> Sequence[bytes]:
        """Of blocks to be found in pages: none of those that the worker before was asked for, which come into fresh ones. It is
        asked again where the others are here no longer."""
        if work.asked is not None:
            keys = work.keys[: work.asked.first]
            if work.asked.failure is None and self._engine.pages.peek(keys) == len(keys):
                return keys
            self._spans.forgo(work)
        return work.keys

    def _give_back(self, work: Job) -> None:
        pages, work.pages = work.pages, []
        self._engine.pages.release(pages)

    async def _take_landing(self, work: Job) -> None:
        """Ask the decode host's store node. Busy: not now."""
        job = work.job
        store = self._peers.store_of(job.store_node)
        if store is None:
            raise PeerSilent(f"no store node is live on {job.store_node}, where {job.decode.id} reads", peer=job.decode.id)
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

    async def _compute(self, work: Job) -> None:
        loop = asyncio.get_running_loop()
        while not work.ended():
            until = await self._incoming.meet(work)
            if work.ended():
                return
            now, done = time.monotonic(), self._planner.done(work.key)
            work.slice_s = self._slices.slice_s(self.turns.beside(), done, len(work.tokens), work.due - now)
            tokens = self._slices.chunk_tokens(work.slice_s, done, scored=work.scores is not None)
            chunk = self._planner.chunk(work.key, until, tokens, one_pass=work.one_pass)
            waited_s = self.turns.waited_s + work.load_seconds
            self.watch.began(now)
            try:
                ids = await loop.run_in_executor(self._compute_thread, work.compute, chunk)
            except LoadStopped:
                return
            except PrefixLost as lost:
                if lost.load is work.span and not await self._spans.alone(work, work.span):
                    return
                await self._incoming.shorten(work, lost.load, lost.blocks)
                continue
            finally:
                self.watch.ended(time.monotonic())
            elapsed_s = time.monotonic() - now - (self.turns.waited_s + work.load_seconds - waited_s)
            self._slices.measured(chunk.start, chunk.end, elapsed_s)
            self._planner.computed(work.key, chunk)
            self._publish(work, chunk)
            if ids is not None:
                self._first_token(work, ids)
                return

    def _publish(self, work: Job, chunk: Chunk) -> None:
        """Whole blocks, reused ones included: every layer of them is in its page now."""
        if not self._reuse:
            return
        whole = chunk.end // self._engine.layout.block_tokens
        for i in range(work.published, whole):
            self._engine.pages.publish(work.pages[i], work.keys[i], work.keys[i - 1] if i else None)
        work.published = max(work.published, whole)

    def _first_token(self, work: Job, ids: tuple[Sampled, ...]) -> None:
        """``ids``: of the attempt and of its siblings; none where none is wanted."""
        now = time.monotonic()
        size, tokens = self._engine.layout.block_tokens, len(work.tokens)
        done_before = work.start + work.ahead_tokens
        sent = work.start - work.reused  # by the worker before
        timing = PrefillTiming(
            tokens,
            done_before,
            now - work.taken,
            work.load_seconds,
            max(done_before - work.matched * size, 0),
            work.load_seconds if sent else work.found.fetch_seconds,
        )
        cached = done_before - sent
        if work.span is not None and sent:
            cached = max(cached, min(work.span.cached_tokens, work.start))
        own = ids[0] if ids else None
        first = FirstToken(own, min(cached, len(work.job.attempt.request.prompt)), work.ends_with(ids), timing, ids[1:])
        work.life.stamp(Instant.FIRST_TOKEN, now)
        work.tell(lambda: work.source.sampled(first))
        # One computed in two parts, or a second time for want of the worker before, is none that an estimate should learn from.
        if not work.ahead_tokens and (work.span is None or sent):
            self.timings.append(timing)
        self.links.extend(work.found.links)
        self.pace.measured(tokens - done_before, timing.seconds - timing.load_seconds)
        self._count_sources(work, done_before - sent, sent)

    def _count_sources(self, work: Job, cached: int, sent: int) -> None:
        """Where the KV of the prompt came from, in tokens: of them ``cached`` existed, and ``sent`` another worker computed."""
        size, tokens = self._engine.layout.block_tokens, len(work.tokens)
        device = min(work.matched * size, cached)
        remote = min(work.fetched_blocks * size + work.ahead_tokens, cached - device)
        self.counts["prefix_tokens_device"] += device
        self.counts["prefix_tokens_remote"] += remote
        self.counts["prefix_tokens_pool"] += cached - device - remote
        self.counts["prefix_tokens_computed"] += tokens - sent - cached
        self.counts["prompt_tokens"] += tokens - sent
        self.counts["reused_tokens"] += cached
        self.counts["span_tokens"] += sent
        self.counts["fetched_bytes"] += work.found.fetched_bytes
        work.life.facts |= {"prompt_tokens": tokens, "cached_tokens": cached, "fetched_tokens": remote}

    async def _leave_pages(self, work: Job) -> None:
        """Compute and prefix load have left the pages; the next job may start while this one drains."""
        await self._incoming.leave(work)
        if work.ended():
            work.tell(work.source.stopped)
        if work.landing is not None:
            self._planner.leave(work.key)
