"""Which waiting prompt goes next, in either order, against a list that is searched in full."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.prefill_worker.chunk_planner import FIRST_RETRY_S, LAST_RETRY_S, MAX_SKIPS, ChunkPlanner, JobKey, Order

LANES = ("n", "m")
AGE_S = 0.5


def planner(order: Order = "shortest", **options: Any) -> ChunkPlanner:
    known = {"queue_limit": 1_000, "age_ms": int(AGE_S * 1000), "chunk_tokens": 64, "block_tokens": 16}
    return ChunkPlanner(**known, order=order, **options)


def started(plan: ChunkPlanner, now: float) -> list[str]:
    """Names in the order in which jobs that take no time would start."""
    out = []
    while (key := plan.next(now)) is not None:
        out.append(key[0])
        plan.leave(key)
    return out


@dataclass
class Waits:
    key: JobKey
    lane: str
    work: float
    arrived: float
    skips: int = 0
    retry_at: float = 0.0

    def age(self, now: float) -> float:
        return now - self.arrived + self.skips * AGE_S


@dataclass
class Dumb:
    """Everything is looked at for every question."""

    order: Order
    weight: float
    cap: float
    jobs: list[Waits] = field(default_factory=list)

    def before(self, a: Waits, b: Waits, now: float) -> bool:
        """``a`` stands before ``b``; of two that are alike, the one that came first."""
        if self.order == "shortest":
            first, second = self.group(a, now), self.group(b, now)
            if first != second:
                return first < second
            if first == 2:
                return self.value(a, now) < self.value(b, now) - 1e-9
        return a.age(now) > b.age(now) + 1e-9

    def group(self, job: Waits, now: float) -> int:
        return 0 if job.skips >= MAX_SKIPS else 1 if job.age(now) >= self.cap else 2

    def value(self, job: Waits, now: float) -> float:
        return job.work - self.weight * job.age(now)

    def next(self, now: float) -> Waits | None:
        best = None
        for job in self.jobs:  # in order of arrival
            stopped = any(o.lane == job.lane and o.skips >= MAX_SKIPS and self.stands_before(o, job, now) for o in self.jobs)
            if job.retry_at <= now and not stopped and (best is None or self.before(job, best, now)):
                best = job
        return best

    def stands_before(self, a: Waits, b: Waits, now: float) -> bool:
        if a is b or self.before(b, a, now):
            return False
        return self.before(a, b, now) or self.jobs.index(a) < self.jobs.index(b)


steps = st.lists(
    st.tuples(
        st.sampled_from(("submit", "submit", "submit", "run", "run", "refuse", "refuse", "refuse")),
        st.sampled_from(LANES),
        st.integers(0, 40),
        st.integers(0, 24),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from(("fifo", "shortest")), st.sampled_from((0.0, 0.125, 1.0)), st.sampled_from((inf, 4.0, 0.5)))
def test_the_next_job_is_the_one_a_search_through_all_of_them_finds(
    calls: list[tuple[str, str, int, int]], order: Order, weight: float, cap: float
) -> None:
    plan, dumb, now = planner(order, age_weight=weight, wait_cap_s=cap), Dumb(order, weight, cap), 0.0
    for number, (what, lane, work, pause) in enumerate(calls):
        now += pause / 16
        if what == "submit":
            key = (f"r{number}", 1)
            plan.submit(key, 100, lane, now, work / 4)
            dumb.jobs.append(Waits(key, lane, work / 4, now))
            continue
        expected = dumb.next(now)
        key_or_none = plan.next(now)
        assert key_or_none == (expected.key if expected else None)
        if expected is None:
            at = plan.next_at()
            assert at is None or at > now
        elif what == "run":
            plan.granted(expected.key, 0)
            plan.leave(expected.key)
            dumb.jobs.remove(expected)
        else:
            plan.refused(expected.key, now)
            expected.retry_at = now + min(FIRST_RETRY_S * 2**expected.skips, LAST_RETRY_S)
            expected.skips += 1


def test_the_shortest_goes_first_and_equals_keep_their_order() -> None:
    plan = planner()
    for name, work in (("long", 9.0), ("short", 1.0), ("middle", 4.0), ("short too", 1.0)):
        plan.submit((name, 1), 100, "n", 0.0, work)
    assert started(plan, 0.0) == ["short", "short too", "middle", "long"]


def test_without_a_prediction_the_one_of_fewest_tokens_goes_first() -> None:
    plan = planner()
    plan.submit(("long", 1), 5_000, "n", 0.0)
    plan.submit(("short", 1), 50, "n", 1.0)
    assert started(plan, 1.0) == ["short", "long"]


@pytest.mark.parametrize(("waited", "first"), [(89.0, "short"), (91.0, "long")])
def test_a_long_job_goes_first_once_it_has_waited_long_enough(waited: float, first: str) -> None:
    plan = planner(age_weight=0.1)
    plan.submit(("long", 1), 100, "n", 0.0, 10.0)
    plan.submit(("short", 1), 100, "n", waited, 1.0)
    assert started(plan, waited)[0] == first


def test_however_many_short_ones_come_a_job_goes_first_after_the_cap() -> None:
    plan = planner(age_weight=0.0, wait_cap_s=15.0)
    plan.submit(("long", 1), 100, "n", 0.0, 100.0)
    for second in range(1, 20):
        plan.submit((f"short {second}", 1), 100, "n", float(second), 0.5)
        if (key := plan.next(float(second))) == ("long", 1):
            break
        assert key is not None
        plan.leave(key)
    assert second == 15


def test_the_oldest_of_those_beyond_the_cap_goes_first() -> None:
    plan = planner(wait_cap_s=5.0)
    plan.submit(("older", 1), 100, "n", 0.0, 9.0)
    plan.submit(("younger", 1), 100, "n", 1.0, 2.0)
    plan.submit(("new", 1), 100, "n", 7.0, 1.0)
    assert started(plan, 7.0) == ["older", "younger", "new"]


def test_in_order_of_arrival_predictions_do_not_matter() -> None:
    plan = planner("fifo", wait_cap_s=0.0)
    plan.submit(("long", 1), 100, "n", 0.0, 9.0)
    plan.submit(("short", 1), 100, "n", 1.0, 1.0)
    assert started(plan, 1.0) == ["long", "short"]


@pytest.mark.parametrize("order", ["fifo", "shortest"])
def test_tenants_go_in_turn_whatever_the_order_within_one(order: Order) -> None:
    plan = planner(order)
    for i in range(6):
        plan.submit((f"flood-{i}", 1), 100, "lane", 0.0, tenant="flood")
    for i in range(2):
        plan.submit((f"quiet-{i}", 1), 120, "lane", 1.0, tenant="quiet")
    taken = []
    while (key := plan.next(2.0)) is not None:
        taken.append(key[0].split("-")[0])
        plan.granted(key, 0)
        plan.leave(key)
    assert taken[:4].count("quiet") == 2
    assert len(taken) == 8
