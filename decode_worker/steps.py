"""The step loop: admit, plan, compute, tell; one step after the other for as long as anybody can compute."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Protocol

from moonpool.core.config import Config
from moonpool.core.errors import Failure
from moonpool.core.membership import StepTiming
from moonpool.core.progress import ProgressWatch
from moonpool.core.request import Sampled
from moonpool.decode_worker.batcher import Admission, Batcher, Limits, Step
from moonpool.decode_worker.compute import Computed, Computer
from moonpool.decode_worker.pacing import Pacing
from moonpool.decode_worker.publisher import BlockPublisher, BlockStore
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.engine.engine import Engine
from moonpool.engine.permit import StepTurns

MAX_TIMINGS = 1_024  # between two reports
log = logging.getLogger(__name__)


class StepOwner(Protocol):
    """Who hears what the loop does. All on the event loop."""

    def fill(self, admission: Admission) -> None:
        """The sequence has pages: bring its KV in, then ``join`` it."""

    def sampled(self, sequence: Sequence, ids: tuple[Sampled, ...]) -> None:
        """The first of ``ids`` was appended to the sequence, the others are its siblings'. None where none is wanted."""

    def failed(self, sequence: Sequence, failure: Failure) -> None:
        """Its step could not be computed."""

    def broke(self, failure: Failure) -> None:
        """The loop itself ended on a bug: nothing is computed any more."""


class StepLoop:
    """Owns the batcher, the compute thread and the publishing of completed blocks."""

    def __init__(
        self, config: Config, engine: Engine, owner: StepOwner, store: Callable[[], BlockStore | None], turns: StepTurns
    ) -> None:
        self.batcher = Batcher(
            engine.pages,
            Limits(
                block_tokens=engine.layout.block_tokens,
                max_batch=config.engine.max_batch,
                chunk_tokens=config.engine.prefill_chunk,
                growth_reserve=config.engine.growth_reserve,
                queue_limit=config.timing.queue_limit,
                reuse=config.engine.reuse,
            ),
        )
        self._pacing = Pacing(gap_s=config.engine.gap_ms / 1e3 or inf, chunk_tokens=config.engine.prefill_chunk)
        self.turns = turns
        self.publisher = BlockPublisher(engine, store, self.poke)
        self.timings: deque[StepTiming] = deque(maxlen=MAX_TIMINGS)
        self.steps = 0
        self._engine = engine
        self._owner = owner
        self.watch = ProgressWatch("computing", config.timing.stuck_after_ms / 1e3)
        self._computer = Computer(engine, self.watch, turns)
        self._wake = asyncio.Event()
        self._cut: Step | None = None  # under way when the loop was ended
        self._measured: tuple[Step, float] | None = None  # and its seconds: computed, and not accounted for yet
        self._task = asyncio.create_task(self._run(), name="steps")

    def poke(self) -> None:
        """Something changed: a sequence came, joined or left, or pages came free."""
        self._wake.set()

    def add(self, sequence: Sequence, siblings: Iterable[Sequence] = ()) -> None:
        """Busy when the queue is full. ``siblings`` follow it until they are forked."""
        self.batcher.add(sequence, siblings)
        self.poke()

    def fork(self, lead: Sequence, wanted: Iterable[Sequence]) -> None:
        """The prompt of ``lead`` is in its pages: those of its siblings that are ``wanted`` go on by themselves."""
        lead.siblings = []
        for sibling in wanted:
            self._pacing.told(sibling, time.monotonic())
            copy = self.batcher.fork(lead, sibling)
            if copy is not None:
                self._engine.copy_page(*copy)
        self.poke()

    def join(self, sequence: Sequence, computed: int) -> None:
        """The KV of ``computed`` tokens is in its pages; a hand-off left its blocks in this host's pool."""
        if sequence.remote and sequence.gaps is None:
            self._pacing.told(sequence, time.monotonic())
        self.publisher.offer(self.batcher.join(sequence, computed), stored=sequence.remote)
        self.poke()

    def end(self, sequence: Sequence) -> None:
        """Out of the batch; its pages go now, or when the step under way is over."""
        self.batcher.end(sequence)
        self.poke()

    async def close(self) -> None:
        """A step under way is waited for."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._computer.close)
        self.turns.close()
        if self._cut is not None:
            self.batcher.abandon(self._cut)  # sequences that ended meanwhile give their pages back
        await self.publisher.close()

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                for admission in self.batcher.admit():
                    self._owner.fill(admission)
                step = self._plan()
                if step is None:
                    self._account()
                    self.turns.rest()
                    await self._wake.wait()
                    continue
                await self._compute(step)
        except Exception as e:
            log.exception("the step loop ended")
            self._owner.broke(Failure.of(e))

    def _plan(self) -> Step | None:
        now = time.monotonic()
        decoding = self.batcher.decoding()
        room = self._pacing.room(decoding, now)
        if not room.free:
            self.turns.tell(room, self._pacing.alone_s(decoding))
        return self.batcher.plan(self._pacing.chunks(room, now, joining=self.batcher.expecting))

    async def _compute(self, step: Step) -> None:
        try:
            computing = self._computer.begin(step)
            self._account()
            computed = await computing
        except asyncio.CancelledError:
            self._cut = step
            raise
        except Exception as e:
            log.exception("a step of %d rows failed", len(step.rows))
            self.batcher.abandon(step)
            for row in step.rows:
                self._owner.failed(row.sequence, Failure.of(e))
            return
        self._advance(step, computed)

    def _account(self) -> None:
        """For the step that was computed last, while the next one computes: nobody waits for it."""
        if self._measured is None:
            return
        (step, seconds), self._measured = self._measured, None
        if all(row.end - row.start == 1 for row in step.rows):
            self.timings.append(StepTiming(len(step.rows), sum(row.end for row in step.rows), seconds))
        self._pacing.measured(step, seconds)

    def _advance(self, step: Step, computed: Computed) -> None:
        self.steps += 1
        self._measured = step, computed.seconds
        own = [ids[0].token if isinstance(ids, tuple) and ids else None for ids in computed.ids]
        self.publisher.offer(self.batcher.complete(step, own))
        now = time.monotonic()
        for row, ids in zip(step.rows, computed.ids, strict=True):
            if ids is None or row.sequence.phase is not Phase.RUNNING:
                continue
            if isinstance(ids, tuple):
                self._pacing.told(row.sequence, now)
                self._owner.sampled(row.sequence, ids)
            else:
                self._owner.failed(row.sequence, ids)
