from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.ids import MemberId
from moonpool.prefill_worker.chunk_planner import ChunkPlanner
from moonpool.scheduler.prefill_queue import PrefillQueues, Rule, Waiting, schedule

FIFO, SHORTEST, CAPPED = Rule(), Rule(shortest=True), Rule(shortest=True, age_weight=0.3, wait_cap_s=4.0)
P0, P1, P2 = (MemberId(f"prefill-{i}") for i in range(3))
NOW = 100.0

tenths = st.integers(1, 80).map(lambda n: n / 10)
jobs = st.lists(st.tuples(tenths, st.integers(0, 200).map(lambda n: NOW - n / 10)), max_size=8).map(
    lambda rows: [Waiting(f"r{i}", work, arrived) for i, (work, arrived) in enumerate(sorted(rows, key=lambda row: row[1]))]
)
rules = st.builds(
    Rule, shortest=st.booleans(), age_weight=st.sampled_from([0.0, 0.1, 1.0]), wait_cap_s=st.sampled_from([inf, 1.0, 5.0, 12.0])
)


def test_in_order_of_arrival_everybody_waits_for_all_before() -> None:
    turns = schedule([Waiting("a", 2.0, 0.0), Waiting("b", 1.0, 1.0)], 10.0, FIFO)
    assert [(t.name, t.begins, t.ends) for t in turns] == [("a", 10.0, 12.0), ("b", 12.0, 13.0)]


def test_a_short_job_does_not_see_the_long_ones_that_wait() -> None:
    queues = PrefillQueues(SHORTEST)
    queues.write(P0, [Waiting("long", 30.0, NOW - 1.0)], NOW + 2.0)
    assert queues.waits((P0,), 1.0, NOW).tolist() == [2.0]
    assert queues.waits((P0,), 31.0, NOW).tolist() == [32.0]


def test_a_job_that_waited_for_long_enough_is_seen_by_all() -> None:
    queues = PrefillQueues(CAPPED)
    queues.write(P0, [Waiting("long", 30.0, NOW - 5.0)], NOW + 2.0)
    assert queues.waits((P0,), 1.0, NOW).tolist() == [32.0]


def test_a_job_that_reaches_the_cap_while_others_compute_goes_before() -> None:
    queues = PrefillQueues(CAPPED)
    waiting = [Waiting("long", 30.0, NOW - 1.0), Waiting("short", 2.0, NOW - 0.5)]
    queues.write(P0, waiting, NOW + 2.0)
    assert queues.waits((P0,), 1.0, NOW).tolist() == [2.0]
    assert queues.waits((P0,), 3.0, NOW).tolist() == [34.0]  # after the short one, the long one has waited for 5 s


def test_rows_follow_the_order_asked_for_and_strangers_are_idle() -> None:
    queues = PrefillQueues()
    queues.write(P0, [Waiting("a", 2.0, NOW)], NOW)
    queues.write(P1, [], NOW + 1.0)
    assert queues.waits((P1, P0, P2), 1.0, NOW).tolist() == [1.0, 2.0, 0.0]
    queues.write(P2, [Waiting(str(i), 1.0, NOW) for i in range(9)], NOW - 5.0)
    assert queues.waits((P0, P1, P2), 1.0, NOW).tolist() == [2.0, 1.0, 9.0]
    queues.forget(P2)
    assert queues.waits((P0, P1, P2), 1.0, NOW).tolist() == [2.0, 1.0, 0.0]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(jobs, st.floats(-3.0, 10.0), tenths), min_size=1, max_size=3), rules)
def test_a_new_job_begins_when_the_whole_schedule_says_so(rows: list[tuple[list[Waiting], float, float]], rule: Rule) -> None:
    queues, names = PrefillQueues(rule), (P0, P1, P2)[: len(rows)]
    for name, (waiting, free_in, _) in zip(names, rows, strict=True):
        queues.write(name, waiting, NOW + free_in)
    for (waiting, free_in, work), name in zip(rows, names, strict=True):
        turns = schedule([*waiting, Waiting("new", work, NOW)], NOW + max(free_in, 0.0), rule)
        (begins,) = (turn.begins for turn in turns if turn.name == "new")
        assert queues.waits((name,), work, NOW)[0] == pytest.approx(begins - NOW)


@settings(max_examples=100, deadline=None)
@given(jobs, st.floats(0.0, 10.0), rules)
def test_the_schedule_is_what_the_prefill_worker_does(waiting: list[Waiting], free_in: float, rule: Rule) -> None:
    planner = ChunkPlanner(
        queue_limit=100,
        age_ms=1_000,
        chunk_tokens=512,
        block_tokens=16,
        order="shortest" if rule.shortest else "fifo",
        age_weight=rule.age_weight,
        wait_cap_s=rule.wait_cap_s,
    )
    for job in waiting:
        planner.submit((job.name, 1), 100, "lane", job.arrived, job.work_s)
    time, done = NOW + free_in, []
    while (key := planner.next(time)) is not None:
        done.append((key[0], time))
        time += next(job.work_s for job in waiting if job.name == key[0])
        planner.granted(key, 0)
        planner.leave(key)
    assert [(turn.name, turn.begins) for turn in schedule(waiting, NOW + free_in, rule)] == done
