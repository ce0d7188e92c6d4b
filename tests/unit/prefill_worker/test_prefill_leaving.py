from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.prefill_worker.chunk_planner import ChunkPlanner
from moonpool.prefill_worker.leaving import too_late

WORK = st.lists(st.floats(0.1, 5.0), max_size=12)


@given(st.floats(0.0, 5.0), WORK, st.floats(0.0, 20.0))
def test_who_stays_has_time_and_who_goes_has_none(running_s: float, work: list[float], left_s: float) -> None:
    waiting = [((f"r{i}", 1), seconds) for i, seconds in enumerate(work)]
    late = set(too_late(running_s, waiting, left_s))
    at = running_s
    for job, seconds in waiting:
        assert (job in late) == (at + seconds > left_s)
        if job not in late:
            at += seconds


def test_those_that_wait_are_told_in_the_order_in_which_they_will_be_taken() -> None:
    plan = ChunkPlanner(queue_limit=10, age_ms=1_000, chunk_tokens=64, block_tokens=16, order="shortest")
    for name, work in (("long", 3.0), ("short", 1.0), ("middle", 2.0)):
        plan.submit((name, 1), 10, "n", 0.0, work)
    assert plan.waiting(0.0) == [(("short", 1), 1.0), (("middle", 1), 2.0), (("long", 1), 3.0)]
    taken = plan.next(0.0)
    assert taken == ("short", 1)
    assert [key[0] for key, _ in plan.waiting(0.0)] == ["middle", "long"]
