"""Requests that end between being scheduled, computed and answered: only they end, the loop goes on, pages balance.

The real step loop, batcher, page pool and compute thread; the engine's arithmetic is replaced by a rule whose answers are
known, so that every request that is left alone can be checked id by id.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moonpool.core.blocks import BlockHasher
from moonpool.core.config import Config, EngineConfig
from moonpool.core.errors import Failure
from moonpool.core.ids import RequestId
from moonpool.core.layout import KVLayout
from moonpool.core.request import Attempt, Request, Sampled, SamplingParams
from moonpool.decode_worker.batcher import Admission
from moonpool.decode_worker.sequence import Phase
from moonpool.decode_worker.sequence import Sequence as Attempted
from moonpool.decode_worker.steps import StepLoop
from moonpool.engine.engine import Row
from moonpool.engine.pages import PagePool
from moonpool.engine.permit import Unshared

SIZE, IDS = 16, 64
WORLDS, REQUESTS = 170, 8
LAYOUT = KVLayout(model="rule", layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=SIZE)
Moment = str  # when an abort strikes


def after(token: int, position: int) -> int:
    """The id that the rule puts behind ``token`` at ``position``."""
    return (token * 7 + position) % IDS


@dataclass
class RuleEngine:
    """Computes ``after``. ``on_compute`` runs on the compute thread, before and behind the arithmetic of each step."""

    pages: PagePool
    on_compute: Callable[[Moment], None] = lambda moment: None
    layout: KVLayout = LAYOUT
    eos_ids: frozenset[int] = frozenset()
    kv_bytes: Any = field(default_factory=lambda: np.zeros((1, 1), np.uint8))

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        self.on_compute("scheduled")
        wanted = [row for row in rows if row.wants_logits]
        logits = torch.full((len(wanted), IDS), -100.0)
        for i, row in enumerate(wanted):
            logits[i, after(row.tokens[-1], row.start + len(row.tokens) - 1)] = 0.0
        self.on_compute("computed")
        return logits


class World:
    """One loop with a few requests, some of which are aborted or finish at moments drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = RuleEngine(PagePool(14), self._on_compute)
        config = Config(engine=EngineConfig(block_tokens=SIZE, max_batch=5, prefill_chunk=32, growth_reserve=0.1))
        self.loop = asyncio.get_running_loop()
        self.steps = StepLoop(config, self.engine, self, lambda: None, Unshared())  # type: ignore[arg-type]
        self.live: list[Attempted] = []
        self.filling: list[Attempted] = []
        self.wants: dict[Attempted, int] = {}
        self.struck: Counter[Moment] = Counter()
        self.aborted: set[Attempted] = set()
        self.broken: list[Failure] = []
        self.changed = asyncio.Event()

    def add(self, name: int) -> None:
        hasher = BlockHasher(bytes(32), bytes(16), SIZE)
        shared = [3] * SIZE * self.draw.randint(0, 2)
        prompt = (*shared, *(self.draw.randrange(IDS) for _ in range(self.draw.randint(1, 40))))
        request = Request(RequestId(f"r{name}"), prompt, SamplingParams(1_000, 0.0), bytes(16), tuple(hasher.keys(prompt)))
        sequence = Attempted(Attempt(request, 1), hasher, 10_000, remote=False)
        self.wants[sequence] = self.draw.randint(1, 6)
        self.live.append(sequence)
        self.steps.add(sequence)

    # -- moments -----------------------------------------------------------------------------------------------------

    def _on_compute(self, moment: Moment) -> None:
        if self.draw.random() < 0.4:
            asyncio.run_coroutine_threadsafe(self._strike_later(moment), self.loop).result(10)

    async def _strike_later(self, moment: Moment) -> None:
        self.strike(moment)

    def strike(self, moment: Moment) -> None:
        """Somebody leaves, in whatever phase."""
        if self.live and self.draw.random() < 0.7:
            self.end(self.draw.choice(self.live), aborted=True)
            self.struck[moment] += 1

    def end(self, sequence: Attempted, *, aborted: bool = False) -> None:
        self.live.remove(sequence)
        if aborted:
            self.aborted.add(sequence)
        self.steps.end(sequence)
        self.changed.set()

    # -- what the loop tells -----------------------------------------------------------------------------------------

    def fill(self, admission: Admission) -> None:
        sequence = admission.sequence
        self.steps.batcher.copied(admission)
        if self.draw.random() < 0.2:
            self.strike("admitted")
        if sequence.phase is Phase.FILLING:
            if self.draw.random() < 0.5:
                self.steps.join(sequence, sequence.computed)
            else:
                self.filling.append(sequence)
                self.loop.call_soon(self._joined_later)

    def _joined_later(self) -> None:
        sequence = self.filling.pop(0)
        if sequence.phase is Phase.FILLING:
            self.steps.join(sequence, sequence.computed)

    def sampled(self, sequence: Attempted, sampled: Sampled) -> None:
        if len(sequence.outputs) >= self.wants[sequence] and sequence in self.live:
            self.end(sequence)
        if self.draw.random() < 0.2:
            self.strike("answered")

    def failed(self, sequence: Attempted, failure: Failure) -> None:
        self.broken.append(failure)

    def broke(self, failure: Failure) -> None:
        self.broken.append(failure)
        self.changed.set()

    # -- the whole ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        for name in range(REQUESTS):
            self.add(name)
            if self.draw.random() < 0.3:
                await asyncio.sleep(0)
        async with asyncio.timeout(30):
            while self.live and not self.broken:
                self.changed.clear()
                await self.changed.wait()
        await self.steps.close()

    def check(self) -> None:
        assert not self.broken
        assert self.engine.pages.used == 0
        assert (self.steps.batcher.holding, self.steps.batcher.waiting) == (0, 0)
        for sequence, wanted in self.wants.items():
            tokens = list(sequence.attempt.request.prompt)
            for position in range(len(tokens) - 1, len(sequence.tokens) - 1):
                tokens.append(after(tokens[position], position))
            assert sequence.tokens == tokens
            assert sequence in self.aborted or len(sequence.outputs) == wanted


async def test_a_thousand_aborts_between_schedule_and_answer_end_only_who_was_aborted() -> None:
    struck: Counter[Moment] = Counter()
    for seed in range(WORLDS):
        world = World(seed)
        await world.run()
        world.check()
        struck += world.struck
    print(dict(struck))
    assert struck.total() >= 1_000
    assert min(struck[moment] for moment in ("admitted", "scheduled", "computed", "answered")) >= 50
