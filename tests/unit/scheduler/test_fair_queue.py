"""Several tenants in one queue; of one alone it must be the plain queue."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.fair_queue import FairQueue
from moonpool.scheduler.policy import Waiting
from moonpool.scheduler.waiting import WaitingQueue

CAP_S = 10.0


def waiting(
    tenant: str,
    order: int,
    *,
    work_s: float = 1.0,
    arrived: float = 0.0,
    target_s: float | None = None,
    priority: int = 0,
    weight: float = 1.0,
) -> Waiting:
    request = PlaceRequest(f"r{order}", 1, (), 10, 10, tenant=tenant, priority=priority, weight=weight)
    return Waiting(request, arrived, order, work_s, work_s, target_s)


def order_of(queue: FairQueue, now: float = 0.0) -> list[Waiting]:
    out = []
    while (one := queue.nth(len(out), now)) is not None:
        out.append(one)
    return out


class OneTenantAgainstPlain(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fair, self.plain = FairQueue(1_000, CAP_S), WaitingQueue(1_000, CAP_S)
        self.here: list[str] = []
        self.now, self.count = 0.0, 0

    def new(self, work_s: float, target_s: float | None, priority: int) -> Waiting:
        self.count += 1
        return waiting("alone", self.count, work_s=work_s, arrived=self.now, target_s=target_s, priority=priority, weight=0.5)

    @rule(
        after=st.sampled_from([0.0, 0.5, 4.0]),
        work=st.sampled_from([0.2, 1.0, 3.0]),
        target_s=st.none() | st.sampled_from([2.0, 8.0]),
        priority=st.integers(-1, 1),
    )
    def arrives(self, after: float, work: float, target_s: float | None, priority: int) -> None:
        self.now += after
        new = self.new(work, target_s, priority)
        busy = np.array([0.5, 2.0])
        assert self.fair.outlook(new, work, busy, self.now) == self.plain.outlook(new, work, busy, self.now)
        self.fair.add(new, work)
        self.plain.add(new, work)
        self.here.append(new.request.request)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), served=st.booleans())
    def leaves(self, data: st.DataObject, served: bool) -> None:
        name = data.draw(st.sampled_from(self.here))
        self.here.remove(name)
        if served:
            self.fair.served(waiting("alone", 0).request, 7.0)
        assert self.fair.remove(name) == self.plain.remove(name)

    @invariant()
    def same_order(self) -> None:
        for i in range(len(self.here) + 1):
            assert self.fair.nth(i, self.now) == self.plain.nth(i, self.now)
        assert self.fair.next_due(self.now) == self.plain.next_due(self.now)
        assert self.fair.backlog("alone") == (len(self.plain), self.plain.prompt_tokens)


TestOneTenantAgainstPlain = OneTenantAgainstPlain.TestCase


def test_a_flood_of_short_and_urgent_prompts_leaves_every_other_turn_to_the_other_tenant() -> None:
    queue = FairQueue(1_000, CAP_S)
    for i in range(50):
        queue.add(waiting("flood", i, work_s=0.5, target_s=1.0, priority=9), 0.5)
    for i in range(50, 53):
        queue.add(waiting("quiet", i, work_s=0.5), 100.0)
    turns = [one.request.tenant for one in order_of(queue, now=60.0)]  # all of the flood are long overdue by then
    assert turns[:6].count("quiet") == 3


@given(seed=st.integers(0, 1 << 32), weight=st.sampled_from([1.0, 2.0, 5.0]))
def test_while_all_wait_nobody_is_ahead_by_more_than_two_prompts(seed: int, weight: float) -> None:
    draw = random.Random(seed)
    works = [(draw.choice("abc"), draw.uniform(0.05, 3.0)) for _ in range(60)]
    weights = {"a": 1.0, "b": 1.0, "c": weight}
    queue = FairQueue(1_000, CAP_S)
    for i, (tenant, work) in enumerate(works):
        queue.add(waiting(tenant, i, work_s=work, weight=weights[tenant]), work)
    left = {tenant: sum(1 for name, _ in works if name == tenant) for tenant in weights}
    served = dict.fromkeys(weights, 0.0)
    while all(left.values()):
        one = queue.nth(0, 0.0)
        assert one is not None
        tenant = one.request.tenant
        queue.served(one.request, one.work_s)
        queue.remove(one.request.request)
        left[tenant] -= 1
        served[tenant] += one.work_s / weights[tenant]
        assert max(served.values()) - min(served.values()) <= 6.0


def test_within_a_tenant_the_shorter_one_goes_first() -> None:
    queue = FairQueue(10)
    for order, work in enumerate((3.0, 1.0, 2.0)):
        queue.add(waiting("a", order, work_s=work), work)
    queue.add(waiting("b", 9, work_s=0.1), 0.1)
    assert [one.order for one in order_of(queue) if one.request.tenant == "a"] == [1, 2, 0]


def test_the_forecast_of_a_wait_counts_only_what_goes_before() -> None:
    queue = FairQueue(1_000)
    for i in range(100):
        queue.add(waiting("flood", i, work_s=1.0), 1.0)
    quiet = queue.outlook(waiting("quiet", 100, work_s=1.0), 1.0, np.zeros(1), 0.0)
    assert quiet.wait_s <= 1.0
    assert queue.outlook(waiting("flood", 101, work_s=1.0), 1.0, np.zeros(1), 0.0).wait_s == pytest.approx(100.0)
    assert len(queue) == 100


def test_a_forecast_names_whom_it_delays_in_another_tenant() -> None:
    queue = FairQueue(10)
    queue.add(waiting("a", 1, work_s=1.0, target_s=3.0), 1.0)
    queue.add(waiting("a", 2, work_s=1.0, target_s=3.0), 2.0)
    queue.served(waiting("a", 0).request, 5.0)
    outlook = queue.outlook(waiting("b", 3, work_s=1.5), 0.1, np.zeros(1), 0.0)
    assert {one.order for one, _ in outlook.delayed} == {1, 2}


def test_a_full_queue_takes_the_place_from_who_has_most() -> None:
    queue = FairQueue(4)
    for i in range(4):
        queue.add(waiting("flood", i, work_s=float(i)), float(i))
    assert queue.full
    gone = queue.displaced_by(waiting("quiet", 9).request)
    assert gone is not None and gone.order == 3
    assert queue.displaced_by(waiting("flood", 9).request) is None


def test_who_has_as_many_places_as_the_others_takes_none_of_theirs() -> None:
    queue = FairQueue(4)
    for i in range(4):
        queue.add(waiting("ab"[i % 2], i), 1.0)
    assert queue.displaced_by(waiting("a", 9).request) is None
    assert queue.displaced_by(waiting("c", 9).request) is not None
    heavy = queue.displaced_by(waiting("c", 9, weight=0.4).request)
    assert heavy is None


def test_of_several_tenants_each_counts_with_its_own_backlog() -> None:
    queue = FairQueue(1_000)
    for i in range(100):
        queue.add(waiting("flood", i), 1.0)
    assert queue.backlog("flood") == (100, 1_000)
    assert queue.backlog("quiet") == (1, 10)
    queue.add(waiting("quiet", 200), 1.0)
    assert queue.backlog("quiet") == (3, 30)
