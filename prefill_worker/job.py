"""One prefill job: its hand-off, its pages, and what the compute thread does for it, layer by layer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from moonpool.core.blocks import KEY_BYTES, BlockHasher, blocks_for
from moonpool.core.errors import Failure, TransferFailed
from moonpool.core.handoff import Begun, Drained, PrefillEvent, PrefillJob
from moonpool.core.ids import MemberId
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.placement import Source
from moonpool.core.request import FinishReason, Sampled
from moonpool.engine.engine import Engine, Row
from moonpool.engine.permit import PromptTurns, Unshared
from moonpool.engine.prompt_scores import PromptScores
from moonpool.engine.sampler import SamplerState, finish_reason, sample
from moonpool.kvstore.pusher import PushLanding
from moonpool.prefill_worker.ahead import Ahead
from moonpool.prefill_worker.chunk_planner import Chunk, JobKey
from moonpool.prefill_worker.handoff_source import (
    Abandon,
    Action,
    Block,
    Drain,
    EmitBegun,
    EmitDrained,
    EmitFailure,
    EmitFirst,
    HandoffSource,
    Push,
    ReleasePages,
)
from moonpool.prefill_worker.prefix import Found, Load, LoadStopped
from moonpool.prefill_worker.span_load import SpanLoad

log = logging.getLogger(__name__)


class Job:
    """``tell`` is for the event loop, ``compute`` for the compute thread; both go through one lock."""

    def __init__(self, job: PrefillJob, engine: Engine, hasher: BlockHasher, on_quiet: Callable[[Job], None]) -> None:
        """``on_quiet`` is called once, on the event loop, when nobody uses the pages any more."""
        attempt = job.attempt
        self.job = job
        self.key: JobKey = (attempt.request.id, attempt.number)
        self.tokens = attempt.context
        self.keys = hasher.keys(self.tokens, known=attempt.request.keys)
        self.scores = PromptScores.of(attempt)
        self.events: asyncio.Queue[PrefillEvent] = asyncio.Queue()
        self.source = HandoffSource(attempt.request.id, attempt.number, engine.layout.layers)
        self.life = Lifetime()
        self.pages: list[int] = []
        self.matched = 0  # leading blocks found in device pages
        self.published = 0  # leading blocks offered to the device-page index
        self.start = 0  # tokens reused
        self.found = Found()
        self.loads: list[Load] = []
        self.reused = 0  # tokens whose KV existed before; the workers before may have found more
        self.asked: SpanLoad | None = None  # of the worker before, while this job waits and has no pages
        self.span: SpanLoad | None = None  # what the worker before computes
        self.one_pass = job.one_pass
        self.late: Ahead | None = None  # what should have been here before computing began
        self.ahead: Ahead | None = None
        self.fetched_blocks = 0  # of ``found``
        self.ahead_tokens = 0  # fetched while others were computed, and used
        self._told = 0  # leading blocks whose layers were told
        self.load_seconds = 0.0
        self.due = inf  # when its first id is wanted
        self.turns: PromptTurns = Unshared()
        self.went_on: Callable[[], None] = lambda: None  # from any thread: a layer is done, or is waited for with good reason
        self.slice_s = inf
        self.landing: PushLanding | None = None
        self.draining: set[asyncio.Task[None]] = set()
        self.store: MemberId | None = None  # the store node that granted the landing
        self.taken = 0.0  # when the worker took it up
        self.on_end: list[Callable[[], None]] = []
        self._ended = asyncio.Event()
        self._reader_gone = False
        self._engine = engine
        self._on_quiet = on_quiet
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()

    @property
    def tail_valid(self) -> int:
        """Tokens of an unfinished last block; 0: none."""
        return len(self.tokens) % self._engine.layout.block_tokens

    @property
    def reuses(self) -> bool:
        """Whether KV of its prompt that exists already is of use: log-probabilities of a prompt need all of it computed."""
        return self.scores is None

    # -- event loop --------------------------------------------------------------------------------------------------

    def tell(self, fact: Callable[[], list[Action]]) -> None:
        """A fact that is no layer, and its actions."""
        with self._lock:
            actions = fact()
        if self.source.stop:
            self._ended.set()
        for action in actions:
            self._perform(action)

    def ended(self) -> bool:
        """Failed, cancelled or over: nothing more is to be computed."""
        return self.source.stop

    def cancel(self, why: Failure) -> None:
        """Nobody wants it any more; a no-op once it has ended."""
        if not self.source.stop:
            self.life.facts.setdefault("outcome", why.reason.value)
            self._reader_gone = True
            self.tell(lambda: self.source.cancelled(why))

    def fail(self, failure: Failure) -> None:
        if not self.source.stop:
            self.life.facts.setdefault("outcome", failure.reason.value)
            self.tell(lambda: self.source.failed(failure))

    async def done_or_ended(self, task: asyncio.Task[Any], limit_s: float | None = None) -> bool:
        """Waits for ``task``, but not longer than the job lives, nor than ``limit_s``; True when ``task`` is done."""
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({task, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return task.done()

    def _perform(self, action: Action) -> None:
        match action:
            case EmitBegun(landing):
                self.events.put_nowait(Begun(landing))
            case EmitFirst(first):
                for part in self.scores.parts() if self.scores is not None else ():
                    self.events.put_nowait(part)
                self.events.put_nowait(first)
            case EmitDrained(drained):
                self.events.put_nowait(drained)
            case EmitFailure(failure):
                self.events.put_nowait(failure)
            case Drain():
                self._drain(give_up=False)
            case Abandon():
                for load in self.loads:
                    load.stop()
                self._drain(give_up=True)
            case ReleasePages():
                self._on_quiet(self)
            case Push():
                raise AssertionError("layers are told on the compute thread")

    def _drain(self, *, give_up: bool) -> None:
        task = self._loop.create_task(self._settle(give_up=give_up))
        self.draining.add(task)
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self.draining.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("landing of %s attempt %d not settled", *self.key, exc_info=error)

    async def _settle(self, *, give_up: bool) -> None:
        """Drain or cancel the landing. Its pushes read the pages no more when this tells ``drained``."""
        landing = self.landing
        assert landing is not None
        try:
            drained = await (give_up_landing(landing, self._reader_gone) if give_up else landing.drain())
            failure = landing.failure
        except Exception as e:  # noqa: BLE001 - the pages must come back whatever the store node answers
            drained, failure = Drained(landing.landing.id, 0, "none"), Failure.of(e)
        if failure is not None and not give_up:
            self.fail(failure)
        self.tell(lambda: self.source.drained(drained))

    # -- compute thread ----------------------------------------------------------------------------------------------

    def compute(self, chunk: Chunk) -> tuple[Sampled, ...] | None:
        """One chunk: every finished layer is pushed while the next one computes, and steps of this host's decode workers go
        before the next layer once it has computed for ``slice_s``.

        After the last chunk the first ids, the attempt's and its siblings', none where none is wanted; before it None.

        LoadStopped when the attempt ended meanwhile, PrefixLost when a loaded block is bad, TransferFailed.
        """
        with self.turns.turn(self.slice_s):
            return self._compute(chunk)

    def _compute(self, chunk: Chunk) -> tuple[Sampled, ...] | None:
        before = blocks_for(chunk.start, self._engine.layout.block_tokens)  # that the chunk builds on
        relied = [(load, wanted) for load in self.loads if (wanted := load.needed(before))]
        blocks = tuple(self._blocks_of(chunk))
        reused = tuple(self._untold_blocks(chunk))
        self._engine.view.gone_out([block.page for block in reused])  # what this worker computed in another role

        def before_layer(layer: int) -> None:
            if self.source.stop:
                raise LoadStopped
            self.turns.between_layers()
            self.went_on()
            if relied:
                self._wait_for(layer, relied)
                if layer == self._engine.layout.layers - 1:
                    self.life.stamp(Instant.PREFIX_LOADED, time.monotonic())
            elif layer == 0:  # nothing to wait for
                self.life.stamp(Instant.PREFIX_LOADED, time.monotonic())
            if reused:
                self._engine.view.landed(layer)  # a carrier may read it there
                self._tell_layer(chunk.number, layer, reused)

        def on_layer(layer: int) -> None:
            self._tell_layer(chunk.number, layer, blocks)

        states = self._states() if chunk.last else []
        adapter = self.job.attempt.request.adapter_digest
        row = Row.of(
            self.tokens, chunk.start, chunk.end, self.pages, wants_logits=bool(states), scores=self.scores, adapter=adapter
        )
        logits = self._engine.forward([row], before_layer=before_layer, on_layer=on_layer)
        self._told = chunk.end // self._engine.layout.block_tokens
        if not chunk.last:
            return None
        self.life.stamp(Instant.LAST_LAYER_COMPUTED, time.monotonic())
        for state in states:
            state.allowed = self._engine.guides.allowed_by(state.params, state.outputs)
        return tuple(sample(logits.expand(len(states), -1), states, self._engine.eos_ids))

    def _wait_for(self, layer: int, loads: list[tuple[Load, int]]) -> None:
        """Others compute meanwhile."""
        late = [(load, wanted) for load, wanted in loads if not load.has(layer, wanted)]
        if not late:
            return
        with self.turns.pause(long=any(load is self.span for load, _ in late)):
            begun = time.monotonic()
            for load, wanted in late:
                load.wait(layer, wanted)
            self.load_seconds += time.monotonic() - begun

    def _states(self) -> list[SamplerState]:
        """What the first ids depend on beside the logits, which the attempt and its siblings share."""
        attempt = self.job.attempt
        if not attempt.request.sampling.max_tokens:
            return []
        requests = [attempt.request, *(attempt.of(sibling).request for sibling in attempt.siblings)]
        return [SamplerState(request.sampling, request.prompt, attempt.emitted) for request in requests]

    def ends_with(self, ids: Iterable[Sampled]) -> bool:
        """Whether nobody goes on after these first ids."""
        return all(self._ends_with(one.token) for one in ids)

    def _ends_with(self, token: int) -> bool:
        attempt = self.job.attempt
        reason = finish_reason(attempt.request.sampling, token, len(attempt.emitted) + 1, self._engine.eos_ids)
        if reason is None and len(self.tokens) + 1 >= self._engine.max_context:
            reason = FinishReason.LENGTH
        return reason is not None

    def _tell_layer(self, chunk: int, layer: int, blocks: tuple[Block, ...]) -> None:
        with self._lock:
            for action in self.source.layer(chunk, layer, blocks):
                assert isinstance(action, Push) and self.landing is not None
                self.landing.push_layer(action.chunk, action.layer, [(b.index, b.page, b.valid) for b in action.blocks])
        if self.landing is not None and (failure := self.landing.failure) is not None:
            raise TransferFailed(failure.message, peer=failure.peer or None)

    def _blocks_of(self, chunk: Chunk) -> Iterable[Block]:
        """Blocks that this chunk completes, and after the last chunk the unfinished one."""
        size = self._engine.layout.block_tokens
        for index in range(chunk.start // size, chunk.end // size):
            yield Block(index, self.pages[index], size)
        if chunk.last and self.tail_valid:
            index = chunk.end // size
            yield Block(index, self.pages[index], self.tail_valid)

    def _untold_blocks(self, chunk: Chunk) -> Iterable[Block]:
        """Those before the chunk that came from elsewhere since the last one."""
        size = self._engine.layout.block_tokens
        for index in range(self._told, chunk.start // size):
            yield Block(index, self.pages[index], size)


def planned_blocks(job: PrefillJob) -> int:
    """How many its placement says need not be computed here."""
    if job.helpers:
        return job.helpers[-1].until
    return sum(part.count for part in job.segments if part.source is not Source.RECOMPUTE)


async def give_up_landing(landing: PushLanding, reader_gone: bool = True) -> Drained:
    """Nothing more is posted. A reader that broke off cannot end the landing: it may never have heard of it."""
    drained = await landing.cancel()
    if reader_gone:
        await landing.end_for_reader()
    return drained


def private_keys(job: JobKey, blocks: int) -> list[bytes]:
    """Names that nobody can find blocks by: without reuse, what is pushed may be nobody's cache, nor be found as such."""
    names = (f"{job[0]}\0{job[1]}\0{block}".encode() for block in range(blocks))
    return [hashlib.blake2b(name, digest_size=KEY_BYTES, person=b"moonpool private").digest() for name in names]
