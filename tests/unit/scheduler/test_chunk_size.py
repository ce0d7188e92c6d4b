"""What steps cost, learned from measurements, and the tokens that fit into one."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.gaps import Room
from moonpool.scheduler.chunk_size import FIRST_TRY, GROWTH, UNHURRIED_S, USUAL, Chunking, Prompt, StepCost, Work

TRUE = (8e-3, 2e-4, 1e-6, 5e-4, 1.5e-7)
SCALES = st.floats(0.05, 50.0)


def true_s(work: Work, by: float = 1.0, costs: tuple[float, ...] = TRUE) -> float:
    terms = (1.0, work.rows, work.context, work.tokens, work.pairs)
    return by * sum(c * t for c, t in zip(costs, terms, strict=True))


def any_work(random: Random) -> Work:
    work = Work()
    for _ in range(random.randrange(9)):
        work = work.with_row(random.randrange(1, 4_000))
    if random.random() < 0.5:
        start = random.randrange(0, 4_000, 16)
        work = work.with_chunk(start, start + random.randrange(16, 513, 16))
    return work if work.rows or work.tokens else work.with_row(100)


def learned(by: float = 1.0, *, seed: int = 0, steps: int = 300, noise: float = 0.05) -> StepCost:
    random, cost = Random(seed), StepCost()
    for _ in range(steps):
        work = any_work(random)
        cost.add(work, true_s(work, by) * random.uniform(1 - noise, 1 + noise))
    return cost


@settings(max_examples=25, deadline=None)
@given(by=SCALES, seed=st.integers(0, 1_000))
def test_mixed_steps_of_any_machine_are_predicted_after_some_of_them(by: float, seed: int) -> None:
    cost, random = learned(by, seed=seed), Random(seed + 1)
    for _ in range(20):
        work = any_work(random)
        assert cost.seconds(work) == pytest.approx(true_s(work, by), rel=0.25)


def test_a_step_that_took_fifty_times_too_long_changes_little() -> None:
    cost = learned()
    before = cost.seconds(Work(4, 2_000, 256, 40_000))
    cost.add(Work(4, 2_000), 50 * true_s(Work(4, 2_000)))
    assert cost.seconds(Work(4, 2_000, 256, 40_000)) == pytest.approx(before, rel=0.15)


def test_a_machine_that_became_slower_is_noticed_within_a_hundred_steps() -> None:
    cost, random = learned(), Random(7)
    for _ in range(100):
        work = any_work(random)
        cost.add(work, true_s(work, 3.0))
    work = Work(4, 2_000, 256, 40_000)
    assert cost.seconds(work) == pytest.approx(true_s(work, 3.0), rel=0.3)


def test_thousands_of_plain_steps_do_not_forget_what_a_prompt_costs() -> None:
    cost, random = learned(), Random(3)
    prompt = Work().with_chunk(1_024, 1_280)
    for _ in range(5_000):
        work = Work(3, random.randrange(500, 3_000))
        cost.add(work, true_s(work) * random.uniform(0.95, 1.05))
    assert cost.seconds(prompt) == pytest.approx(true_s(prompt), rel=0.3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 600), st.floats(1e-7, 1e6)), max_size=60))
def test_whatever_was_measured_a_step_never_costs_less_than_nothing(measured: list[tuple[int, int, float]]) -> None:
    cost = StepCost()
    for rows, tokens, seconds in measured:
        cost.add(Work(rows, rows * 100).with_chunk(64, 64 + tokens), seconds)
    assert 0.0 <= cost.seconds(Work(10, 1_000, 100, 5_000)) < inf
    assert cost.tokens_within(0.1, Work(1, 100), 0) >= 0


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 8_000), rows=st.integers(0, 16), limit=st.floats(0.0, 0.5), seed=st.integers(0, 3))
def test_as_many_tokens_as_fit_and_not_one_more(start: int, rows: int, limit: float, seed: int) -> None:
    cost, beside = learned(seed=seed), Work(rows, rows * 900)
    n = cost.tokens_within(limit, beside, start)
    assert n <= 1_024
    if n:
        assert cost.seconds(beside.with_chunk(start, start + n)) <= limit * (1 + 1e-6)
    if n < 1_024:
        assert cost.seconds(beside.with_chunk(start, start + n + 1)) > limit * (1 - 1e-6)


def test_chunks_grow_from_a_small_one_by_what_was_measured() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.add(Work(2, 300), true_s(Work(2, 300), 0.01))
    assert cost.tokens_within(10.0, Work(2, 300), 0) == FIRST_TRY
    cost.add(Work(2, 300).with_chunk(0, 100), true_s(Work(2, 300).with_chunk(0, 100), 0.01))
    assert cost.tokens_within(10.0, Work(2, 300), 0) == 200


def test_impossible_measurements_are_skipped() -> None:
    cost = learned()
    before = cost.seconds(Work(1, 1))
    for seconds in (0.0, -1.0, inf, float("nan")):
        cost.add(Work(1, 1), seconds)
    assert cost.seconds(Work(1, 1)) == before


CHUNKING = Chunking(512)


def test_without_answers_a_prompt_has_the_whole_chunk() -> None:
    assert CHUNKING.tokens(StepCost(), Work(), Room(), Prompt(0, 4_000)) == 512


def test_a_large_chunk_that_no_answer_waits_for_is_over_within_half_a_second() -> None:
    cost, large = learned(), Chunking(8_192)
    for start in (0, 4_096, 60_000):
        n = large.tokens(cost, Work(), Room(), Prompt(start, 100_000))
        assert USUAL <= n <= 8_192
        assert n == USUAL or cost.seconds(Work().with_chunk(start, start + n)) <= UNHURRIED_S
        assert n < 8_192 and cost.seconds(Work().with_chunk(start, start + 2 * n)) > UNHURRIED_S
    beside = Work().with_chunk(0, 300)
    assert large.tokens(cost, beside, Room(), Prompt(60_000, 100_000)) == USUAL - 300, "chunks of one step are one"


def test_nothing_was_measured_so_chunks_that_nobody_waits_for_begin_with_the_usual_one_and_grow() -> None:
    cost, done, chunks = StepCost(), 0, list[int]()
    while done < 8_000:
        n = min(Chunking(4_096).tokens(cost, Work(), Room(), Prompt(done, 8_000)), 8_000 - done)
        cost.add(Work().with_chunk(done, done + n), 1e-3 + 2e-5 * n)
        chunks.append(n)
        done += n
    assert chunks[0] == USUAL and max(chunks) > 2 * USUAL
    assert all(n <= GROWTH * max(chunks[:i]) for i, n in enumerate(chunks) if i), "no leap beyond what was measured"


def test_a_prompt_takes_its_answers_steady_pace_unless_it_would_be_late_for_that() -> None:
    cost, beside, room = learned(), Work(2, 400), Room(0.05, 0.2)

    def seconds(due_s: float) -> float:
        n = CHUNKING.tokens(cost, beside, room, Prompt(0, 2_048, due_s))
        return cost.seconds(beside.with_chunk(0, n))

    alone = cost.prompt_seconds(0, 2_048, 512)
    assert seconds(inf) == seconds(10 * alone) == pytest.approx(0.05, rel=0.05)
    assert seconds(1.1 * alone) == pytest.approx(0.2, rel=0.05)
    assert seconds(0.5 * alone) == pytest.approx(0.05, rel=0.05), "a lost cause makes nobody else wait"
