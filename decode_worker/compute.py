"""The one compute thread of a worker: a batch of rows in, sampled ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moonpool.core.errors import Failure, MoonpoolError
from moonpool.core.progress import ProgressWatch
from moonpool.core.request import Sampled
from moonpool.decode_worker.batcher import Step
from moonpool.engine.engine import Engine, Row
from moonpool.engine.sampler import SamplerState, sample


@dataclass(frozen=True, slots=True)
class Computed:
    """``sampled[i]`` belongs to row i of the step; None where the row does not sample, a Failure where its guide has ended
    that one answer. ``seconds`` on the thread."""

    sampled: tuple[Sampled | Failure | None, ...]
    seconds: float


class Computer:
    """Runs one step at a time. The caller keeps the pages of its rows until the step is over, also when it is cancelled."""

    def __init__(self, engine: Engine, watch: ProgressWatch) -> None:
        self._engine, self._watch = engine, watch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def run(self, step: Step) -> Computed:
        """Whatever the engine raises comes out of here; the engine stays usable."""
        rows, states = [], []
        for row in step.rows:
            seq = row.sequence
            rows.append(Row(seq.tokens[row.start : row.end], row.start, tuple(seq.pages), row.samples))
            if row.samples:
                request = seq.attempt.request
                states.append(SamplerState(request.sampling, request.prompt, seq.outputs))
        self._watch.began(time.monotonic())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, rows, states)
        finally:
            self._watch.ended(time.monotonic())

    def close(self) -> None:
        """Blocks until the step under way is over."""
        self._thread.shutdown(wait=True)

    def _compute(self, rows: Sequence[Row], states: Sequence[SamplerState]) -> Computed:
        begun = time.monotonic()
        logits = self._engine.forward(rows)
        failures = [self._guide(state) for state in states]
        drawn = zip(sample(logits, states, self._engine.eos_ids), failures, strict=True)
        told = iter([failure or sampled for sampled, failure in drawn])
        return Computed(tuple(next(told) if row.wants_logits else None for row in rows), time.monotonic() - begun)

    def _guide(self, state: SamplerState) -> Failure | None:
        """Find out what may come next; what goes wrong there ends this answer, not those beside it."""
        try:
            state.allowed = self._engine.guides.allowed_by(state.params, state.outputs)
        except MoonpoolError as e:
            return Failure.of(e)
        return None
