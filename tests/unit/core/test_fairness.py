from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.fairness import KEPT, FairClock

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0}


@given(st.integers(0, 1 << 32))
def test_tenants_that_always_want_more_are_served_by_weight(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.uniform(0.01, 5.0) for _ in range(60)]
    clock = FairClock()
    for tenant in WEIGHTS:
        clock.join(tenant)
    served = dict.fromkeys(WEIGHTS, 0.0)
    for cost in costs:
        tenant = min(WEIGHTS, key=clock.time)
        clock.serve(tenant, cost, WEIGHTS[tenant])
        served[tenant] += cost / WEIGHTS[tenant]
        assert max(served.values()) - min(served.values()) <= 2 * 5.0  # one cost of each of two (Goyal et al., theorem 1)


def test_who_was_away_is_owed_nothing_for_it() -> None:
    clock = FairClock()
    clock.join("a")
    clock.join("b")
    for _ in range(100):
        clock.serve("a", 1.0)
    clock.join("c")
    order = []
    for _ in range(6):
        tenant = min(("a", "c"), key=clock.time)
        clock.serve(tenant, 1.0)
        order.append(tenant)
    assert order.count("a") == order.count("c") == 3


def test_who_waited_all_along_goes_before_who_was_served() -> None:
    clock = FairClock()
    clock.join("b")
    clock.join("a")
    clock.serve("a", 10.0)
    clock.join("a")
    assert clock.time("b") < clock.time("a")


def test_the_book_is_bounded() -> None:
    clock = FairClock()
    for i in range(KEPT + 10):
        clock.serve(f"t{i}", 1.0)
        clock.join(f"u{i}")
    assert len(clock) == KEPT
