"""Long prompts beside running answers, on a virtual clock: the production batcher and pacing around a formula for steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from moonpool.core.blocks import BlockHasher
from moonpool.core.ids import RequestId
from moonpool.core.request import Attempt, Request, SamplingParams, Targets
from moonpool.decode_worker.batcher import GRAIN, Batcher, Limits
from moonpool.decode_worker.pacing import Pacing, work_of
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.engine.pages import PagePool
from moonpool.engine.prompt_scores import PromptScores
from moonpool.loadgen.record import slowest_tenth
from moonpool.scheduler.chunk_size import UNHURRIED_S, Work

BLOCK = 64
CHUNK = 512


def sequence(name: str, tokens: int, *, tbt_ms: float | None = None, ttft_ms: float | None = None) -> Sequence:
    hasher = BlockHasher(bytes(32), bytes(16), BLOCK)
    prompt = tuple(Random(name).choices(range(1_000), k=tokens))
    targets = Targets(ttft_ms, tbt_ms)
    request = Request(RequestId(name), prompt, SamplingParams(10_000), bytes(16), tuple(hasher.keys(prompt)), targets)
    return Sequence(Attempt(request, 1), hasher, 1 << 20, remote=False)


class Clocked:
    """A worker on a virtual clock; ``gap_s``: of answers without a target."""

    def __init__(self, *, gap_s: float = inf, paced: bool = True, chunk: int = CHUNK) -> None:
        self.batcher = Batcher(PagePool(1_000), Limits(BLOCK, 32, chunk, 0.0, 100, reuse=False))
        self.pacing = Pacing(gap_s=gap_s, chunk_tokens=chunk)
        self.paced = paced
        self.now = 0.0
        self.random = Random(1)
        self.times: dict[Sequence, list[float]] = {}
        self.chunks: list[int] = []

    def add(self, sequence: Sequence, *, due: float = inf) -> Sequence:
        sequence.due = due
        self.batcher.add(sequence)
        for admission in self.batcher.admit():
            self.batcher.copied(admission)
            self.batcher.join(admission.sequence, admission.sequence.computed)
        self.times[sequence] = []
        return sequence

    def step(self) -> bool:
        room = self.pacing.room(self.batcher.decoding(), self.now)
        joining = self.batcher.expecting
        step = self.batcher.plan(self.pacing.chunks(room, self.now, joining=joining) if self.paced else None)
        if step is None:
            return False
        self.chunks += [row.end - row.start for row in step.rows if row.end - row.start > 1]
        seconds = self.seconds(work_of(step.rows)) * self.random.uniform(0.95, 1.05)
        self.now += seconds + 1e-3  # between two steps
        self.pacing.measured(step, seconds)
        self.batcher.complete(step, [7 if row.samples else None for row in step.rows])
        for row in step.rows:
            if row.samples and row.sequence.phase is Phase.RUNNING:
                self.pacing.told(row.sequence, self.now)
                self.times[row.sequence].append(self.now)
        return True

    @staticmethod
    def seconds(work: Work) -> float:
        return 5e-3 + 2e-4 * work.rows + 3e-7 * work.context + 3e-4 * work.tokens + 3e-8 * work.pairs

    def until_first(self, sequence: Sequence) -> float:
        begun = self.now
        while not self.times[sequence]:
            assert self.step()
        return self.now - begun

    def tbt(self, sequence: Sequence) -> float:
        times = self.times[sequence]
        found = slowest_tenth([b - a for a, b in pairwise(times)])
        assert found is not None
        return found


def four_answers(worker: Clocked, tbt_ms: float | None) -> list[Sequence]:
    running = [worker.add(sequence(f"r{i}", 200, tbt_ms=tbt_ms)) for i in range(4)]
    for _ in range(40):
        worker.step()
    return running


@pytest.mark.parametrize("tbt_ms", [20.0, 40.0, 100.0, 200.0])
def test_answers_keep_their_target_while_long_prompts_are_computed_beside_them(tbt_ms: float) -> None:
    worker = Clocked()
    running = four_answers(worker, tbt_ms)
    worker.chunks.clear()
    for i in range(3):
        worker.until_first(worker.add(sequence(f"long{i}", 4_096, tbt_ms=tbt_ms)))
    assert max(worker.tbt(one) for one in running) <= tbt_ms / 1e3
    assert all(n % GRAIN == 0 for n in worker.chunks)
    assert sum(worker.chunks) == 3 * 4_096


def test_without_pacing_the_same_answers_miss_it() -> None:
    worker = Clocked(paced=False)
    running = four_answers(worker, 100.0)
    worker.until_first(worker.add(sequence("long", 4_096)))
    assert min(worker.tbt(one) for one in running) > 0.13


def test_answers_without_a_target_wait_as_long_as_is_configured() -> None:
    worker = Clocked(gap_s=0.15)
    running = four_answers(worker, None)
    worker.until_first(worker.add(sequence("long", 4_096)))
    assert 0.05 < max(worker.tbt(one) for one in running) <= 0.15


def test_nobody_waits_so_the_prompt_has_whole_chunks() -> None:
    worker = Clocked(gap_s=0.05)
    worker.until_first(worker.add(sequence("long", 2_048)))
    assert worker.chunks == [CHUNK] * 4


def test_a_prompt_by_itself_has_large_chunks_but_for_an_answer_that_may_join_or_rows_of_logits() -> None:
    worker = Clocked(chunk=2_048)
    for i in range(6):
        worker.until_first(worker.add(sequence(f"learnt{i}", 1_536)))
    worker.chunks.clear()
    worker.until_first(worker.add(sequence("long", 2_048)))
    whole, rest = worker.chunks
    assert whole + rest == 2_048
    assert worker.seconds(Work().with_chunk(0, whole)) == pytest.approx(UNHURRIED_S, rel=0.2)

    worker.chunks.clear()
    scored = sequence("scored", 2_048)
    scored.scores = PromptScores(2_048, 0)
    worker.until_first(worker.add(scored))
    assert worker.chunks == [CHUNK] * 4

    worker.chunks.clear()
    arriving = sequence("arriving", 64)
    arriving.remote = True
    worker.batcher.add(arriving)
    worker.batcher.admit()
    worker.until_first(worker.add(sequence("beside", 2_048)))
    assert worker.chunks == [CHUNK] * 4


def test_a_prompt_near_its_deadline_gets_what_answers_that_were_fast_can_bear() -> None:
    seconds = {}
    for name, ttft in (("late", 0.8), ("unhurried", 60.0)):
        worker = Clocked()
        running = four_answers(worker, 40.0)
        for _ in range(300):  # ids come every 10 ms: slow ones are far from being a tenth
            worker.step()
        seconds[name] = worker.until_first(worker.add(sequence("long", 2_048), due=worker.now + ttft))
        assert max(worker.tbt(one) for one in running) <= 0.04
    assert seconds["late"] < 0.8 < seconds["unhurried"]


def test_a_prompt_that_is_late_whatever_is_done_does_not_hurry() -> None:
    worker = Clocked()
    running = four_answers(worker, 60.0)
    worker.until_first(worker.add(sequence("long", 4_096), due=worker.now + 0.1))
    assert max(worker.tbt(one) for one in running) <= 0.06


def test_a_request_without_targets_or_with_its_first_id_is_due_at_no_time() -> None:
    one = sequence("a", 10, ttft_ms=400.0).attempt
    assert replace(one, deadline_ms=119_900).first_id_within_s(120_000) == pytest.approx(0.3)
    assert replace(one, deadline_ms=119_000).first_id_within_s(120_000) < 0.0
    assert replace(one, emitted=(1,)).first_id_within_s(120_000) == inf
    assert sequence("b", 10).attempt.first_id_within_s(120_000) == inf
