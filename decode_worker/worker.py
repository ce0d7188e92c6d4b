"""The decode worker: takes attempts from gateways, has their prompts filled in, batches them and streams their ids.

Everything but the compute thread and the copy thread runs on the event loop, so the batcher, the pages and the attempts
need no lock. One exit for every attempt: ``_retire`` says the last word to its gateway, then its pages go when nobody
uses them any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Protocol

import grpc

from moonpool.core.blocks import BlockHasher, load_hash_key
from moonpool.core.config import Config
from moonpool.core.errors import Busy, Cancelled, DeadlinePassed, Failure, MoonpoolError
from moonpool.core.ids import RequestId, Role
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.membership import (
    LiveAttempt,
    Liveness,
    Member,
    MemberChange,
    Peers,
    PrefillTiming,
    StepTiming,
    WorkerReport,
)
from moonpool.core.placement import Placement
from moonpool.core.request import Attempt, Emission, FinishReason, Sampled
from moonpool.decode_worker.admission import check_attempt, token_limit
from moonpool.decode_worker.batcher import Admission, Batcher, Limits, Step
from moonpool.decode_worker.compute import Computed, Computer
from moonpool.decode_worker.live import Attempts, Live
from moonpool.decode_worker.publisher import BlockPublisher, BlockStore
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.decode_worker.service import DecodeFace
from moonpool.decode_worker.stream import TokenStream
from moonpool.engine.engine import Engine
from moonpool.engine.journal import PageJournal
from moonpool.engine.sampler import finish_reason

MAX_TIMINGS = 1_024  # of each kind between two reports
KEPT_LIVES = 256
log = logging.getLogger(__name__)


class PrefixSource(Protocol):
    """Where whole blocks of a prompt computed here may come from, beside the device pages."""

    async def load(self, live: Live, matched: int) -> int:
        """Bring the blocks after the ``matched`` leading ones into the sequence's pages; returns how many lead now."""


class DecodeWorker:
    """Service object of a decode worker, and of role ``both`` with a ``prefix`` source."""

    def __init__(self, config: Config, engine: Engine, member: Member, peers: Peers, hash_key: bytes) -> None:
        self._config, self._engine, self._member, self._peers, self._hash_key = config, engine, member, peers, hash_key
        self._reuse = config.engine.reuse
        self._batcher = Batcher(
            engine.pages,
            Limits(
                block_tokens=engine.layout.block_tokens,
                max_batch=config.engine.max_batch,
                chunk_tokens=config.engine.prefill_chunk,
                growth_reserve=config.engine.growth_reserve,
                queue_limit=config.timing.queue_limit,
                reuse=self._reuse,
            ),
        )
        self._attempts = Attempts()
        self._streams: set[TokenStream] = set()
        self._computer = Computer(engine)
        self._journal = PageJournal(engine.pages, member.id, member.incarnation)
        self._publisher = BlockPublisher(engine, self._block_store, self._poke)
        self._prefix: PrefixSource | None = None
        self._filling: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._broken: Failure | None = None
        self._prefills: deque[PrefillTiming] = deque(maxlen=MAX_TIMINGS)
        self._steps: deque[StepTiming] = deque(maxlen=MAX_TIMINGS)
        self._counts = {"steps": 0, "tokens": 0, "started": 0, "refused": 0, "cancelled": 0, "failed": 0}
        self.lives: deque[tuple[RequestId, int, Lifetime]] = deque(maxlen=KEPT_LIVES)
        self._unsubscribe: Callable[[], None] = lambda: None
        self._loop_task = asyncio.create_task(self._run(), name="steps")

    @classmethod
    async def start(cls, config: Config, engine: Engine, member: Member, peers: Peers) -> DecodeWorker:
        """Ready to serve. ConfigError where the hash key cannot be read."""
        worker = cls(config, engine, member, peers, load_hash_key(config.key_file(Path.home())))
        await worker._open()
        return worker

    async def _open(self) -> None:
        self._unsubscribe = self._peers.subscribe(self._peer_changed)

    def add_to(self, server: grpc.aio.Server) -> None:
        DecodeFace(self).add_to(server)

    # -- what gateways ask -------------------------------------------------------------------------------------------

    def open_stream(self) -> TokenStream:
        stream = TokenStream()
        self._streams.add(stream)
        return stream

    def close_stream(self, stream: TokenStream) -> None:
        """The gateway is gone, or too slow: nobody wants its answers any more."""
        stream.close()
        self._streams.discard(stream)
        for live in self._attempts.all():
            if live.stream is stream:
                self._counts["cancelled"] += 1
                self._abort(live, None)

    def begin(self, stream: TokenStream, attempt: Attempt, placement: Placement) -> None:
        """Take ``attempt``; a refusal is its first and last emission. A newer attempt ends the older one of its request."""
        request = attempt.request.id
        newest, older = self._attempts.supersede(request, attempt.number)
        if not newest:
            if self._attempts.get(request, attempt.number) is None:
                self._refuse(stream, attempt, Cancelled(f"attempt {attempt.number} of {request} is over or replaced"))
            return
        if older is not None:
            self._abort(older, None)
        try:
            self._admit(stream, attempt, placement)
        except MoonpoolError as e:
            self._counts["refused"] += 1
            self._refuse(stream, attempt, e)

    def cancel(self, stream: TokenStream, request: RequestId, attempt: int) -> None:
        """End it without an answer; unknown or finished attempts are a no-op."""
        live = self._attempts.get(request, attempt)
        if live is not None and live.stream is stream:
            self._counts["cancelled"] += 1
            self._abort(live, Emission(request, attempt, live.position, finish=FinishReason.CANCELLED))

    def _admit(self, stream: TokenStream, attempt: Attempt, placement: Placement) -> None:
        if self._broken is not None:
            raise Busy(f"{self._member.id} has stopped computing: {self._broken.message}", peer=self._member.id)
        check_attempt(attempt, self._engine)
        hasher = BlockHasher(self._hash_key, attempt.request.namespace, self._engine.layout.block_tokens)
        remote = placement.prefill.id != self._member.id
        sequence = Sequence(attempt, hasher, token_limit(self._engine), remote)
        self._batcher.add(sequence)
        live = Live(attempt, placement, stream, sequence)
        live.life.stamp(Instant.ADMITTED, time.monotonic())
        live.deadline = asyncio.get_running_loop().call_later(attempt.deadline_ms / 1000, self._deadline, live)
        self._attempts.add(live)
        self._counts["started"] += 1
        self._poke()

    def _refuse(self, stream: TokenStream, attempt: Attempt, error: MoonpoolError) -> None:
        stream.put(Emission(attempt.request.id, attempt.number, len(attempt.emitted), error=Failure.of(error)))

    # -- the step loop -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                for admission in self._batcher.admit():
                    self._fill(admission)
                step = self._batcher.plan()
                if step is None:
                    await self._wake.wait()
                    continue
                await self._compute(step)
        except Exception as e:
            log.exception("the step loop ended")
            self._broken = Failure.of(e)
            for live in self._attempts.all():
                self._fail(live, self._broken)

    async def _compute(self, step: Step) -> None:
        try:
            computed = await self._computer.run(step)
        except Exception as e:
            log.exception("a step of %d rows failed", len(step.rows))
            self._batcher.abandon(step)
            for row in step.rows:
                live = self._attempts.get(*row.sequence.name)
                if live is not None:
                    self._fail(live, Failure.of(e))
            return
        self._advance(step, computed)

    def _advance(self, step: Step, computed: Computed) -> None:
        self._counts["steps"] += 1
        if all(row.end - row.start == 1 for row in step.rows):
            self._steps.append(StepTiming(len(step.rows), sum(row.end for row in step.rows), computed.seconds))
        ids = [None if sampled is None else sampled.token for sampled in computed.sampled]
        self._publisher.offer(self._batcher.complete(step, ids))
        for row, sampled in zip(step.rows, computed.sampled, strict=True):
            live = self._attempts.get(*row.sequence.name)
            if live is not None and sampled is not None and row.sequence.phase is Phase.RUNNING:
                self._note_prefill(live)
                if self._emit(live, sampled):
                    self._abort(live, None)

    def _emit(self, live: Live, sampled: Sampled) -> bool:
        """Stream the id that was just appended; True when it ends the request."""
        position = live.position - 1
        sequence = live.sequence
        finish = finish_reason(live.attempt.request.sampling, sampled.token, position + 1, self._engine.eos_ids)
        if finish is None and len(sequence.tokens) >= sequence.limit:
            finish = FinishReason.LENGTH
        live.life.stamp(Instant.FIRST_TOKEN, time.monotonic())
        cached = live.cached_tokens if live.emitted == 0 else 0
        live.emitted += 1
        self._counts["tokens"] += 1
        live.stream.put(Emission(live.request, live.attempt.number, position, sampled, finish, cached))
        return finish is not None

    # -- filling a sequence's pages ----------------------------------------------------------------------------------

    def _fill(self, admission: Admission) -> None:
        live = self._attempts.get(*admission.sequence.name)
        assert live is not None  # ended sequences are in no queue
        live.life.stamp(Instant.PREFILL_BEGUN, time.monotonic())
        if admission.copy is not None:
            shared, private = admission.copy
            self._engine.kv_bytes[private] = self._engine.kv_bytes[shared]
            self._batcher.copied(admission)
        if self._prefix is None or not self._reuse or admission.sequence.left == 1:
            self._join(live, admission.sequence.computed)
        else:
            self._spawn(self._load(live, self._prefix, admission.matched))

    async def _load(self, live: Live, prefix: PrefixSource, matched: int) -> None:
        stopped = asyncio.Event()
        live.stop = stopped.set
        begun = time.monotonic()
        size = self._engine.layout.block_tokens
        try:
            blocks = await prefix.load(live, matched)
        except MoonpoolError as e:  # what the pool cannot give is computed
            log.warning("prefix of %s not loaded: %s", live.request, e)
            blocks = matched
        live.load_seconds += time.monotonic() - begun
        live.stop = None
        if stopped.is_set():
            self._release(live)
            return
        if live.emitted == 0:
            live.loaded_tokens = (blocks - matched) * size
        self._join(live, min(blocks * size, len(live.sequence.tokens) - 1))

    def _join(self, live: Live, computed: int) -> None:
        if live.emitted == 0 and not live.sequence.remote:
            live.cached_tokens = min(computed, len(live.attempt.request.prompt))
        live.life.stamp(Instant.RUNNABLE, time.monotonic())
        self._publisher.offer(self._batcher.join(live.sequence, computed))
        self._poke()

    def _note_prefill(self, live: Live) -> None:
        """A prompt computed here has its first token."""
        if live.emitted or live.sequence.remote:
            return
        begun = live.life.at[Instant.PREFILL_BEGUN]
        self._prefills.append(
            PrefillTiming(
                len(live.attempt.context),
                live.cached_tokens,
                time.monotonic() - begun,
                live.load_seconds,
                live.loaded_tokens,
            )
        )

    # -- ends --------------------------------------------------------------------------------------------------------

    def _deadline(self, live: Live) -> None:
        error = DeadlinePassed(f"{live.attempt.deadline_ms} ms were left of the request's budget when it came here")
        self._fail(live, Failure.of(error))

    def _fail(self, live: Live, failure: Failure) -> None:
        self._counts["failed"] += 1
        self._abort(live, Emission(live.request, live.attempt.number, live.position, error=failure))

    def _abort(self, live: Live, last: Emission | None) -> None:
        """The one exit: whatever phase it is in, its pages go once nobody uses them."""
        if not self._retire(live, last):
            return
        if live.stop is not None:
            live.stop()
        else:
            self._release(live)

    def _retire(self, live: Live, last: Emission | None) -> bool:
        if not self._attempts.remove(live):
            return False
        if live.deadline is not None:
            live.deadline.cancel()
        live.life.stamp(Instant.FINISHED, time.monotonic())
        self.lives.append((live.request, live.attempt.number, live.life))
        if last is not None:
            live.stream.put(last)
        return True

    def _release(self, live: Live) -> None:
        self._batcher.end(live.sequence)
        self._poke()

    def _poke(self) -> None:
        self._wake.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    def _peer_changed(self, change: MemberChange) -> None:
        if change.member.role is Role.CONDUCTOR and change.liveness is Liveness.LIVE:
            self._journal.resync()

    def _block_store(self) -> BlockStore | None:
        return None

    # -- Service -----------------------------------------------------------------------------------------------------

    def numbers(self) -> dict[str, float]:
        pages, batcher = self._engine.pages, self._batcher
        return {
            "pages_total": pages.total,
            "pages_used": pages.used,
            "pages_free": pages.free,
            "pages_cached": pages.cached,
            "pages_publishing": len(self._publisher),
            "requests_live": len(self._attempts),
            "requests_running": batcher.running,
            "requests_filling": batcher.holding - batcher.running,
            "requests_waiting": batcher.waiting,
            "streams": len(self._streams),
            "preemptions": batcher.preemptions,
            "blocks_published": self._publisher.stored,
            "blocks_not_published": self._publisher.given_up,
            "threads": threading.active_count(),
            **{f"{name}_count": value for name, value in self._counts.items()},
        }

    def words(self) -> dict[str, str]:
        return {
            "model": self._member.model,
            "layout": self._engine.layout.fingerprint,
            "state": self._broken.message if self._broken else "computing",
        }

    def report(self) -> WorkerReport:
        prefills, steps = tuple(self._prefills), tuple(self._steps)
        self._prefills.clear()
        self._steps.clear()
        pages = self._engine.pages
        return WorkerReport(
            self._member.id,
            self._member.incarnation,
            tuple(self._describe(live) for live in self._attempts.all()),
            pages.free + pages.cached,
            pages.total,
            prefills,
            steps,
            self._journal.frames(),
        )

    def _describe(self, live: Live) -> LiveAttempt:
        sequence, request = live.sequence, live.attempt.request
        left = 0 if sequence.remote or sequence.left == 1 else sequence.left
        possible = min(request.sampling.max_tokens, sequence.limit - len(request.prompt)) - live.position
        return LiveAttempt(live.request, live.attempt.number, len(request.prompt), max(possible, 0), left)

    async def close(self) -> None:
        self._unsubscribe()
        for stream in list(self._streams):
            self.close_stream(stream)
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, *self._filling, return_exceptions=True)
        await self._publisher.close()
        await asyncio.to_thread(self._computer.close)
