"""The prefill queue: order, ageing, chunk borders, cancellation in every stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import Bug, Busy
from moonpool.prefill_worker.chunk_planner import MAX_SKIPS, ChunkPlanner, JobKey


def planner(**options: int) -> ChunkPlanner:
    return ChunkPlanner(**{"queue_limit": 4, "age_ms": 1_000, "chunk_tokens": 64, "block_tokens": 16, **options})


A, B, C = ("a", 1), ("b", 1), ("c", 1)


def test_jobs_start_in_order_of_arrival() -> None:
    plan = planner()
    for at, key in enumerate((A, B, C)):
        plan.submit(key, 10, "n", float(at))
    started = []
    while (key := plan.next(10.0)) is not None:
        started.append(key)
        plan.leave(key)
    assert started == [A, B, C]


def test_only_one_job_is_under_way() -> None:
    plan = planner()
    plan.submit(A, 10, "n", 0.0)
    plan.submit(B, 10, "n", 0.0)
    assert plan.next(0.0) == A
    assert plan.next(0.0) is None
    plan.granted(A, 0)
    assert plan.next(0.0) is None
    assert plan.current == A
    plan.leave(A)
    assert plan.next(0.0) == B


def test_a_full_queue_is_busy_and_a_started_job_leaves_room() -> None:
    plan = planner(queue_limit=2)
    plan.submit(A, 10, "n", 0.0)
    plan.submit(B, 10, "n", 0.0)
    with pytest.raises(Busy, match="queue_limit is 2"):
        plan.submit(C, 10, "n", 0.0)
    plan.next(0.0)
    with pytest.raises(Busy):
        plan.submit(C, 10, "n", 0.0)
    plan.granted(A, 0)
    plan.submit(C, 10, "n", 0.0)


def test_a_refused_job_lets_the_next_one_pass_and_is_tried_again_first() -> None:
    plan = planner()
    plan.submit(A, 10, "n", 0.0)
    plan.submit(B, 10, "n", 0.1)
    assert plan.next(0.2) == A
    plan.refused(A, 0.2)
    assert plan.next(0.2) == B
    plan.granted(B, 0)
    plan.leave(B)
    assert plan.next(0.2) is None
    at = plan.next_at()
    assert at is not None and 0.2 < at < 0.3
    assert plan.next(at) == A


def test_a_skipped_job_overtakes_those_that_came_before_it_by_less_than_its_age() -> None:
    plan = planner(age_ms=1_000)
    plan.submit(A, 10, "n", 0.0)
    assert plan.next(0.0) == A
    plan.submit(B, 10, "n", 0.5)  # waits while A computes
    plan.granted(A, 0)
    plan.submit(C, 10, "n", 0.9)
    plan.leave(A)
    assert plan.next(1.0) == B
    plan.refused(B, 1.0)
    plan.submit(A, 10, "n", 1.0)
    assert plan.next(2.0) == B, "half a second older and one second of seniority"


def test_a_big_job_among_endless_small_ones_is_passed_a_bounded_number_of_times() -> None:
    plan = planner(queue_limit=1_000)
    plan.submit(A, 10_000, "n", 0.0)
    passed, now = 0, 0.0
    for small in range(500):
        now += 0.01
        plan.submit((f"small{small}", 1), 16, "n", now)
        key = plan.next(now)
        if key == A:
            plan.refused(A, now)
        elif key is not None:
            passed += 1
            plan.leave(key)
    assert passed < 500 * 0.9
    waits = [plan.next(now + dt) for dt in (0.1, 0.2, 0.5)]
    assert set(waits) <= {A, None}, "after MAX_SKIPS refusals nobody passes"
    assert MAX_SKIPS >= 1


def test_a_lane_that_grants_nothing_does_not_hold_up_the_others() -> None:
    plan = planner()
    plan.submit(A, 10, "full", 0.0)
    now = 0.0
    for _ in range(MAX_SKIPS):
        now = plan.next_at() or now
        assert plan.next(now) == A
        plan.refused(A, now)
    plan.submit(B, 10, "full", now)
    plan.submit(C, 10, "empty", now)
    assert plan.next(now) == C


@pytest.mark.parametrize("stage", ["waiting", "asking", "computing", "gone"])
def test_leaving_is_possible_in_every_stage_and_twice(stage: str) -> None:
    plan = planner()
    plan.submit(A, 10, "n", 0.0)
    if stage != "waiting":
        plan.next(0.0)
    if stage == "computing":
        plan.granted(A, 0)
    plan.leave(A)
    if stage == "gone":
        plan.leave(A)
    plan.submit(B, 10, "n", 0.0)
    assert plan.next(0.0) == B
    assert plan.remaining(A) == 0


@given(
    total=st.integers(1, 2_000),
    start=st.integers(0, 1_999),
    chunk_tokens=st.integers(1, 600),
    block_tokens=st.sampled_from([16, 64]),
)
def test_chunks_cover_the_rest_of_the_prompt_once_and_end_on_block_borders(
    total: int, start: int, chunk_tokens: int, block_tokens: int
) -> None:
    start = min(start // block_tokens * block_tokens, total - 1)
    plan = planner(chunk_tokens=chunk_tokens, block_tokens=block_tokens)
    plan.submit(A, total, "n", 0.0)
    plan.next(0.0)
    plan.granted(A, start)
    at, number = start, 0
    while plan.remaining(A):
        chunk = plan.chunk(A)
        assert (chunk.number, chunk.start) == (number, at)
        assert chunk.end % block_tokens == 0 or chunk.last
        assert chunk.end - chunk.start <= max(chunk_tokens, block_tokens)
        assert chunk.last == (chunk.end == total)
        plan.computed(A, chunk)
        at, number = chunk.end, number + 1
    assert at == total


def test_losing_a_part_of_the_prefix_restarts_from_there_under_the_same_chunk_number() -> None:
    plan = planner()
    plan.submit(A, 100, "n", 0.0)
    plan.next(0.0)
    plan.granted(A, 64)
    plan.restart(A, 32)
    assert (plan.chunk(A).number, plan.chunk(A).start, plan.chunk(A).end) == (0, 32, 96)


def test_a_chunk_ends_where_blocks_from_elsewhere_begin_and_the_next_one_starts_behind_them() -> None:
    plan = planner()
    plan.submit(A, 200, "n", 0.0)
    plan.next(0.0)
    plan.granted(A, 16)
    first = plan.chunk(A, 48)
    assert (first.start, first.end) == (16, 48)
    assert plan.chunk(A, 160).end == 80
    plan.computed(A, first)
    assert plan.chunk(A, 48).end == 112, "computing goes on where nothing came"
    plan.skip(A, 160)
    assert plan.done(A) == 160
    assert (plan.chunk(A).number, plan.chunk(A).start, plan.chunk(A).end, plan.chunk(A).last) == (1, 160, 200, True)
    for wrong in (144, 200):
        with pytest.raises(Bug, match=f"160 of 200, no skip to {wrong}"):
            plan.skip(A, wrong)
    plan.restart(A, 96)
    assert plan.done(A) == 96


def test_facts_in_the_wrong_stage_are_bugs() -> None:
    plan = planner()
    plan.submit(A, 10, "n", 0.0)
    for wrong in (
        lambda: plan.granted(A, 0),
        lambda: plan.chunk(A),
        lambda: plan.refused(B, 0.0),
        lambda: plan.submit(A, 1, "n", 0.0),
    ):
        with pytest.raises(Bug):
            wrong()


@given(st.lists(st.tuples(st.sampled_from("snrgcl"), st.integers(0, 5)), max_size=60))
def test_any_order_of_calls_keeps_at_most_one_job_under_way(calls: list[tuple[str, int]]) -> None:
    plan = planner(queue_limit=3)
    under_way: JobKey | None = None
    now = 0.0
    for what, which in calls:
        key = (str(which), 1)
        now += 0.05
        try:
            if what == "s":
                plan.submit(key, 40, "n", now)
            elif what == "n":
                found = plan.next(now)
                assert found is None or under_way is None
                under_way = found or under_way
            elif what == "r":
                plan.refused(key, now)
                under_way = None
            elif what == "g":
                plan.granted(key, 0)
            elif what == "c":
                plan.computed(key, plan.chunk(key))
            else:
                plan.leave(key)
                under_way = None if under_way == key else under_way
        except (Bug, Busy):
            pass
    assert plan.queued <= 3
