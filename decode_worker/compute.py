"""The one compute thread of a worker: a batch of rows in, sampled ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import torch

from moonpool.core.errors import Failure, MoonpoolError
from moonpool.core.progress import ProgressWatch
from moonpool.core.request import Sampled
from moonpool.decode_worker.batcher import Step
from moonpool.decode_worker.sequence import Sequence as Running
from moonpool.engine.engine import Engine, Row
from moonpool.engine.permit import StepTurns
from moonpool.engine.sampler import SamplerState, sample


@dataclass(frozen=True, slots=True)
class Computed:
    """``ids[i]`` belong to row i of the step: those of its sequence and of its siblings; none where none is wanted.

    None where the row does not reach the end of its sequence, a Failure where a guide has ended that one answer. ``seconds`` on
    the thread, waiting for the permit excluded.
    """

    ids: tuple[tuple[Sampled, ...] | Failure | None, ...]
    seconds: float


class Computer:
    """Runs one step at a time. The caller keeps the pages of its rows until the step is over, also when it is cancelled."""

    def __init__(self, engine: Engine, watch: ProgressWatch, turns: StepTurns) -> None:
        self._engine, self._watch, self._turns = engine, watch, turns
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def begin(self, step: Step) -> asyncio.Future[Computed]:
        """What comes of ``step``, which computes from now on. Whatever the engine raises is in it; the engine stays usable."""
        rows: list[Row] = []
        draws: list[list[SamplerState] | None] = []
        for row in step.rows:
            seq = row.sequence
            draws.append(_draws(seq) if row.samples else None)
            scores = None if seq.scores is None or seq.scores.complete else seq.scores
            table, wants_logits = tuple(seq.pages), bool(draws[-1])
            adapter = seq.attempt.request.adapter_digest
            rows.append(
                Row.of(seq.tokens, row.start, row.end, table, wants_logits=wants_logits, scores=scores, adapter=adapter)
            )
        self._watch.began(time.monotonic())
        computing = asyncio.get_running_loop().run_in_executor(self._thread, self._compute, rows, draws)
        computing.add_done_callback(lambda _: self._watch.ended(time.monotonic()))
        return computing

    def close(self) -> None:
        """Blocks until the step under way is over."""
        self._thread.shutdown(wait=True)

    def _compute(self, rows: Sequence[Row], draws: Sequence[list[SamplerState] | None]) -> Computed:
        with self._turns.turn():
            return self._step(rows, draws)

    def _step(self, rows: Sequence[Row], draws: Sequence[list[SamplerState] | None]) -> Computed:
        begun = time.monotonic()
        logits = self._engine.forward(rows)
        shares = [len(states) for states in draws if states]
        if any(n > 1 for n in shares):
            logits = logits.repeat_interleave(torch.tensor(shares), dim=0)
        failures = [self._guide(states or ()) for states in draws]
        drawn = iter(sample(logits, [state for states in draws for state in states or ()], self._engine.eos_ids))
        ids = [None if states is None else tuple(islice(drawn, len(states))) for states in draws]
        told = tuple(failure or mine for mine, failure in zip(ids, failures, strict=True))
        return Computed(told, time.monotonic() - begun)

    def _guide(self, states: Iterable[SamplerState]) -> Failure | None:
        """Find out what may come next; what goes wrong there ends these answers, not those beside them."""
        try:
            for state in states:
                if state.params.guide is not None:
                    state.allowed = self._engine.guides.allowed_by(state.params, state.outputs)
        except MoonpoolError as e:
            return Failure.of(e)
        return None


def _draws(sequence: Running) -> list[SamplerState]:
    """What the next ids depend on beside the logits: that of the sequence, and its siblings' first ones."""
    states = []
    for one in (sequence, *sequence.siblings):
        request = one.attempt.request
        if request.sampling.max_tokens:
            states.append(SamplerState(request.sampling, request.prompt, one.outputs))
    return states
