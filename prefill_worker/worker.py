"""The prefill worker: one job computes at a time, the next one's landing is asked for when it is about to start.

The event loop owns the queue, the pages and the jobs; the compute thread runs the chunks and tells the finished layers;
the load thread brings reused blocks in ahead of it. Pages are held until the landing has drained, while the next job
computes already.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc

from moonpool.core.blocks import BlockHasher, load_hash_key
from moonpool.core.config import Config
from moonpool.core.errors import (
    Busy,
    Cancelled,
    DeadlinePassed,
    Failure,
    InvalidRequest,
    Moved,
    PromptTooLarge,
    Reason,
)
from moonpool.core.handoff import Drained, PrefillEvent, PrefillJob
from moonpool.core.ids import RequestId, Role
from moonpool.core.lifetime import Instant, Lives
from moonpool.core.membership import LiveAttempt, Liveness, Member, MemberChange, Peers, WorkerReport
from moonpool.core.progress import Progress
from moonpool.engine.engine import Engine
from moonpool.engine.journal import PageJournal
from moonpool.engine.permit import prompt_turns
from moonpool.kvstore.handoffs.handoffs import Handoffs
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.sealing.keys import KvKey, kv_keys
from moonpool.prefill_worker.chunk_planner import ChunkPlanner, JobKey
from moonpool.prefill_worker.job import Job, planned_blocks
from moonpool.prefill_worker.leaving import leave
from moonpool.prefill_worker.runner import Runner
from moonpool.prefill_worker.service import PrefillFace
from moonpool.prefill_worker.spans import require_spans

MAX_TIMINGS = 1_024
TOLD_LIVES = 32  # in ``words``
CLOSE_S = 5.0  # for jobs to drain when the worker leaves
log = logging.getLogger(__name__)


class PrefillWorker:
    """Service object of a prefill worker."""

    def __init__(
        self, config: Config, engine: Engine, member: Member, peers: Peers, hash_key: bytes, kv_key: KvKey | None = None
    ) -> None:
        self._config, self._engine, self._member, self._peers, self._hash_key = config, engine, member, peers, hash_key
        self._planner = ChunkPlanner(
            queue_limit=config.timing.queue_limit,
            age_ms=config.timing.landing_age_ms,
            chunk_tokens=config.engine.prefill_chunk,
            block_tokens=engine.layout.block_tokens,
            order=config.scheduler.order,
            age_weight=config.scheduler.age_weight,
            wait_cap_s=config.scheduler.wait_cap_ms / 1000 or math.inf,
            span_tokens=config.engine.span_tokens,
        )
        self._jobs: dict[JobKey, Job] = {}  # until their pages are back
        self._newest: dict[RequestId, int] = {}  # attempts of requests with jobs here
        self._handoffs = Handoffs(member, engine.layout, engine.view, peers, config.timing)  # of spans before its own
        view = engine.view
        self._pusher = Pusher(member, engine.layout, view.bytes, config.transfer, key=kv_key, in_device=view.in_device)
        reuse, stuck_s = config.engine.reuse, config.timing.stuck_after_ms / 1e3
        turns = prompt_turns(config)
        parts = member, engine, peers, self._planner, self._handoffs, self._pusher, turns
        self._runner = Runner(*parts, reuse=reuse, stuck_s=stuck_s)
        self._journal = PageJournal(engine.pages, member.id, member.incarnation)
        self._wake = asyncio.Event()
        self._leaving = False
        self._counts: Counter[str] = Counter()
        self.lifetimes = Lives()
        self._unsubscribe: Callable[[], None] = lambda: None
        self._loop_task = asyncio.create_task(self._run(), name="prefill")

    @classmethod
    async def start(cls, config: Config, engine: Engine, member: Member, peers: Peers) -> PrefillWorker:
        """Ready to serve. ConfigError where a key cannot be read, LayoutMismatch where this host's pool differs."""
        home = Path.home()
        keys = kv_keys(config, home)
        kv_key = None if keys is None else keys.current
        worker = cls(config, engine, member, peers, load_hash_key(config.key_file(home)), kv_key)
        worker._unsubscribe = peers.subscribe(worker._peer_changed)
        await worker._handoffs.start()
        return worker

    def add_to(self, server: grpc.aio.Server) -> None:
        PrefillFace(self).add_to(server)

    async def run(self, job: PrefillJob) -> AsyncGenerator[PrefillEvent, None]:
        """The events of ``job``, the last one ``Drained`` or a ``Failure``. Closing the iterator cancels the job."""
        try:
            work = self._submit(job)
        except Exception as e:  # noqa: BLE001 - travels as the job's failure
            self._counts["refused"] += 1
            yield Failure.of(e)
            return
        try:
            while True:
                event = await work.events.get()
                yield event
                if isinstance(event, Drained | Failure):
                    return
        finally:
            self._cancel(work, Failure(Reason.CANCELLED, "the decode worker ended its call"))

    def _submit(self, job: PrefillJob) -> Job:
        if self._leaving:
            raise self._moved()
        attempt = job.attempt
        capacity = min(self._engine.pages.total * self._engine.layout.block_tokens, self._engine.max_context)
        if not attempt.context:
            raise InvalidRequest("prompt: it has no tokens; send at least one", param="prompt")
        if len(attempt.context) > capacity:
            raise PromptTooLarge(
                f"prompt: {len(attempt.context)} tokens, {self._member.id} holds {capacity} at once; "
                "shorten the prompt, or raise engine.pages",
                param="prompt",
            )
        require_spans(job.helpers, len(attempt.context), self._engine.layout.block_tokens, self._member.id)
        self._engine.require_adapter(attempt.request.adapter)
        request = attempt.request.id
        if attempt.number <= self._newest.get(request, -1):
            raise Cancelled(f"attempt {attempt.number} of {request} is replaced by attempt {self._newest[request]}")
        hasher = BlockHasher(self._hash_key, attempt.request.namespace, self._engine.layout.block_tokens)
        work = Job(job, self._engine, hasher, self._quiet)
        try:
            left = len(work.tokens) - min(planned_blocks(job) * self._engine.layout.block_tokens, len(work.tokens) - 1)
            work_s = self._runner.pace.seconds(left)
            self._planner.submit(
                work.key,
                len(work.tokens),
                job.store_node,
                time.monotonic(),
                work_s,
                tenant=attempt.request.tenant,
                weight=attempt.request.weight,
            )
        except Busy as e:
            raise Busy(f"{self._member.id}: {e.message}", peer=self._member.id) from e
        if older := self._jobs.get((request, self._newest.get(request, -1))):
            self._cancel(older, Failure(Reason.CANCELLED, f"attempt {attempt.number} replaces this one"))
        self._newest[request] = attempt.number
        self._jobs[work.key] = work
        work.due = time.monotonic() + attempt.first_id_within_s(self._config.timing.request_budget_ms)
        guide = attempt.request.sampling.guide
        if guide is not None and not self._engine.guides.knows(guide):  # compiled by the time that its prompt is computed
            asyncio.get_running_loop().run_in_executor(None, self._engine.guides.warm, guide)
        self._counts["jobs"] += 1
        work.life.stamp(Instant.QUEUED, time.monotonic())
        work.life.facts["decode"] = job.decode.id
        limit = asyncio.get_running_loop().call_later(attempt.deadline_ms / 1000, self._deadline, work)
        work.on_end.append(limit.cancel)
        self._runner.ask_soon(work)
        self._wake.set()
        return work

    # -- ends --------------------------------------------------------------------------------------------------------

    def _cancel(self, work: Job, why: Failure) -> None:
        """Whatever it is doing; a no-op once it has ended."""
        if work.key in self._jobs and not work.source.stop:
            self._counts["cancelled"] += 1
            work.life.stamp(Instant.CANCELLED, time.monotonic())
            work.cancel(why)

    def _deadline(self, work: Job) -> None:
        work.life.stamp(Instant.CANCELLED, time.monotonic())
        work.fail(Failure.of(DeadlinePassed(f"{work.job.attempt.deadline_ms} ms were left when the job came here")))

    def _quiet(self, work: Job) -> None:
        """Nobody uses the job's pages any more."""
        self._planner.leave(work.key)
        pages, work.pages = work.pages, []
        self._engine.pages.release(pages)
        for call in work.on_end:
            call()
        if self._jobs.pop(work.key, None) is work:
            request, number = work.key
            if self._newest.get(RequestId(request)) == number:
                del self._newest[RequestId(request)]
        work.life.stamp(Instant.FINISHED, time.monotonic())
        work.life.facts.setdefault("outcome", "ok")
        self.lifetimes.add(*work.key, work.life)
        self._wake.set()

    def _peer_changed(self, change: MemberChange) -> None:
        """A decode worker that is gone wants nothing; a store node that is gone takes nothing."""
        peer = change.member
        if peer.role is Role.CONDUCTOR and change.liveness is Liveness.LIVE:
            self._journal.resync()
        if peer.role is Role.STORE and peer.node != self._member.node and change.liveness is Liveness.LIVE:
            self._pusher.prepare()
        for work in list(self._jobs.values()):
            reader = work.job.decode
            dead_reader = reader.id == peer.id and (
                peer.incarnation > reader.incarnation
                or (peer.incarnation == reader.incarnation and change.liveness is not Liveness.LIVE)
            )
            if dead_reader:
                self._cancel(work, Failure(Reason.PEER_SILENT, f"{peer.id} is {change.liveness}: {change.proof}", peer.id))
            elif peer.role is Role.STORE and work.store == peer.id and change.liveness is not Liveness.LIVE:
                work.fail(Failure(Reason.PEER_SILENT, f"{peer.id} is {change.liveness}: {change.proof}", peer.id))

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            key = self._planner.next(time.monotonic())
            if key is None:
                await self._wait()
                continue
            work = self._jobs[key]
            try:
                await self._runner.run(work)
            except Exception as e:
                log.exception("prefill of %s attempt %d", *key)
                self._planner.leave(key)
                work.fail(Failure.of(e))

    async def _wait(self) -> None:
        """Until something changed, or a job whose landing was refused may be tried again."""
        at = self._planner.next_at()
        try:
            async with asyncio.timeout(None if at is None else max(at - time.monotonic(), 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass

    # -- leaving -----------------------------------------------------------------------------------------------------

    async def drain(self, limit_s: float) -> None:
        """Take nothing more; finish within ``limit_s`` seconds what can be finished, give the rest back."""
        self._leaving = True
        await leave(self, limit_s)

    def held(self) -> list[JobKey]:
        return list(self._jobs)

    def work_left(self, now: float) -> tuple[float, list[tuple[JobKey, float]]]:
        current = self._planner.current
        running_s = self._runner.pace.seconds(self._planner.remaining(current)) if current else 0.0
        return running_s, self._planner.waiting(now)

    def others(self) -> bool:
        computing = (m for role in (Role.PREFILL, Role.BOTH) for m in self._peers.live(role))
        return any(m.ready and m.id != self._member.id for m in computing)

    def give_back(self, job: JobKey) -> None:
        work = self._jobs[job]
        if not work.ended():
            self._counts["moved"] += 1
            work.fail(Failure.of(self._moved()))

    def _moved(self) -> Moved:
        return Moved(f"{self._member.id} is leaving", peer=self._member.id)

    # -- Service -----------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        pages = self._engine.pages
        sent = {f"bytes_sent_{carrier}": float(n) for carrier, n in self._pusher.sent_by_carrier().items()}
        return {
            **sent,
            "pages_total": pages.total,
            "pages_used": pages.used,
            "pages_free": pages.free,
            "pages_cached": pages.cached,
            "requests_live": len(self._jobs),
            "requests_waiting": self._planner.queued,
            "requests_running": len(self._planner) - self._planner.queued,
            "requests_draining": len(self._jobs) - len(self._planner),
            "handoffs": len(self._handoffs),
            "store_connected": float(self._handoffs.link.client is not None),
            "threads": threading.active_count(),
            **self._runner.turns.numbers(),
            **{f"{name}_count": value for name, value in (self._counts + self._runner.counts).items()},
        }

    def progress(self, now: float) -> list[Progress]:
        return [self._runner.watch.at(now)]

    def words(self) -> dict[str, str]:
        return {
            "model": self._member.model,
            "layout": self._engine.layout.fingerprint,
            "carriers": self._pusher.carriers(),
            "lives": self.lifetimes.to_json(TOLD_LIVES),
        }

    def report(self) -> WorkerReport:
        prefills = tuple(self._runner.timings)
        self._runner.timings.clear()
        links = tuple(self._runner.links)
        self._runner.links.clear()
        pages = self._engine.pages
        attempts = tuple(
            LiveAttempt(
                work.job.attempt.request.id,
                work.key[1],
                len(work.tokens),
                self._planner.remaining(work.key),
                running=work.key == self._planner.current,
            )
            for work in self._jobs.values()
        )
        return WorkerReport(
            self._member.id,
            self._member.incarnation,
            attempts,
            pages.free + pages.cached,
            pages.total,
            prefills,
            g1_frames=self._journal.frames(),
            links=links,
        )

    async def clear_device_pages(self) -> int:
        """Forget cached pages that nobody uses; returns how many."""
        return self._engine.pages.clear_cached()

    async def close(self) -> None:
        self._unsubscribe()
        for work in list(self._jobs.values()):
            self._cancel(work, Failure(Reason.PEER_SILENT, f"{self._member.id} is leaving", self._member.id))
        await self._all_quiet()
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        await self._runner.close()
        await self._pusher.close()
        await self._handoffs.close()

    async def _all_quiet(self) -> None:
        """Cancelled jobs have given their pages back, or ``CLOSE_S`` is over."""
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._jobs:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            log.warning("%d jobs not drained when leaving", len(self._jobs))
