"""Many steps at once against one step after the other: the same tokens, pages, blocks and times."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.blocks import BlockHasher, blocks_for
from moonpool.core.ids import RequestId
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.decode_worker.batcher import Batcher, Limits
from moonpool.decode_worker.runs import Pace, Run
from moonpool.decode_worker.sequence import CompletedBlock, Phase, Sequence
from moonpool.engine.pages import PagePool

BLOCK = 16
TOKEN = 7


def sequence(name: str, tokens: int) -> Sequence:
    hasher = BlockHasher(bytes(32), bytes(16), BLOCK)
    prompt = tuple((len(name) * 31 + sum(map(ord, name)) * 1_000 + i) % 50_000 for i in range(tokens))
    request = Request(RequestId(name), prompt, SamplingParams(100), bytes(16), tuple(hasher.keys(prompt)))
    return Sequence(Attempt(request, 1), hasher, 10_000, True)


class Side:
    """One batcher, its sequences' ends, and the seconds its steps took."""

    def __init__(self, pages: int, prompts: list[tuple[int, int]], reuse: bool) -> None:
        self.pool = PagePool(pages)
        limits = Limits(block_tokens=BLOCK, max_batch=8, chunk_tokens=64, growth_reserve=0.0, queue_limit=100, reuse=reuse)
        self.batcher = Batcher(self.pool, limits)
        self.sequences = [sequence(f"s{i}", tokens) for i, (tokens, _) in enumerate(prompts)]
        self.ends = {s.name: len(s.tokens) + 1 + outputs for s, (_, outputs) in zip(self.sequences, prompts, strict=True)}
        self.done: list[bytes] = []
        for one in self.sequences:
            self.batcher.add(one)
        for admission in self.batcher.admit():
            admission.sequence.tokens.append(TOKEN)
            self.take(self.batcher.join(admission.sequence, len(admission.sequence.tokens) - 1))

    def take(self, done: list[CompletedBlock]) -> None:
        self.done += [block.key for block in done]
        self.pool.release([block.page for block in done])

    def left(self, one: Sequence) -> int:
        return self.ends[one.name] - len(one.tokens)

    def state(self) -> list[object]:
        return [(s.name, s.phase, len(s.tokens), s.computed, len(s.pages), s.published) for s in self.sequences] + [
            self.pool.free,
            self.pool.cached,
            self.batcher.preemptions,
        ]


def pace(batch: int) -> Pace:
    return Pace(0.02 + 0.001 * batch, 3e-5)


def step_one_by_one(side: Side, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        running = [s for s in side.sequences if s.phase is Phase.RUNNING]
        seconds.append(pace(len(running)).base_s + pace(len(running)).per_token_s * sum(len(s.tokens) for s in running))
        step = side.batcher.plan()
        assert step is not None and len(step.rows) == len(running)
        side.take(side.batcher.complete(step, [TOKEN] * len(step.rows)))
    return seconds


@settings(deadline=None, max_examples=150)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=6),
    spare=st.integers(0, 8),
    reuse=st.booleans(),
    share=st.floats(0.0, 1.2),
)
def test_steps_at_once_do_what_steps_one_by_one_do(
    prompts: list[tuple[int, int]], spare: int, reuse: bool, share: float
) -> None:
    pages = sum(blocks_for(tokens, BLOCK) for tokens, _ in prompts) + spare
    fast, slow = Side(pages, prompts, reuse), Side(pages, prompts, reuse)
    promised = fast.batcher.steady(pace, fast.left)
    until_s = inf if promised is None or share > 1.0 else share * promised.seconds
    run, done = fast.batcher.run_until_change(pace, fast.left, TOKEN, until_s)
    fast.take(done)
    assert (run is None) == (promised is None)
    if run is None:
        step = slow.batcher.plan()
        assert slow.batcher.preemptions > 0 or step is None, "one by one they could go on"
        return
    seconds = step_one_by_one(slow, run.steps)
    assert slow.batcher.preemptions == 0
    assert fast.state() == slow.state()
    assert sorted(fast.done) == sorted(slow.done)
    assert sum(seconds) == pytest.approx(run.seconds)
    assert [run.first_s + i * run.slope_s for i in range(run.steps)] == pytest.approx(seconds)
    if until_s != inf:
        assert run.seconds >= until_s - 1e-6 or run.steps == promised.steps  # type: ignore[union-attr]
        assert run.steps == 1 or sum(seconds[:-1]) < until_s + 1e-6


@settings(deadline=None, max_examples=60)
@given(prompts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5), spare=st.integers(0, 6))
def test_a_run_ends_exactly_where_somebody_leaves_or_pages_are_short(prompts: list[tuple[int, int]], spare: int) -> None:
    pages = sum(blocks_for(tokens, BLOCK) for tokens, _ in prompts) + spare
    fast, slow = Side(pages, prompts, False), Side(pages, prompts, False)
    run, _ = fast.batcher.run_until_change(pace, fast.left, TOKEN)
    if run is None:
        return
    step_one_by_one(slow, run.steps)
    leaves = any(slow.left(s) == 0 for s in slow.sequences if s.phase is Phase.RUNNING)
    if not leaves:
        running = sum(s.phase is Phase.RUNNING for s in slow.sequences)
        step = slow.batcher.plan()
        assert slow.batcher.preemptions > 0 or step is None or len(step.rows) < running


def test_nothing_runs_at_once_while_a_prompt_is_computed_or_a_step_is_under_way() -> None:
    side = Side(40, [(20, 5), (20, 5)], False)
    computing = sequence("computing", 30)
    computing.remote = False
    side.batcher.add(computing)
    (admission,) = side.batcher.admit()
    side.batcher.join(admission.sequence, 0)
    assert side.batcher.run_until_change(pace, side.left, TOKEN) == (None, [])
    side.batcher.end(computing)
    step = side.batcher.plan()
    assert step is not None
    assert side.batcher.steady(pace, side.left) is None
    side.batcher.abandon(step)
    assert side.batcher.steady(pace, side.left) is not None


@given(first=st.floats(1e-4, 1.0), share=st.floats(0.0, 1.0), steps=st.integers(1, 2_000))
def test_the_step_at_a_border_is_found_by_its_time(first: float, share: float, steps: int) -> None:
    slope = first * share
    run = Run(steps, 1, 1, first, slope)
    assert run.done_by(run.seconds) == steps
    assert run.done_by(run.seconds - first / 2) == steps
    assert run.done_by(run.seconds + first / 2) == steps + 1
