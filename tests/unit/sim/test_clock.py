from __future__ import annotations

import pytest

from moonpool.core.errors import Bug
from moonpool.sim.clock import Clock


def test_calls_come_in_order_of_time_then_of_asking() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append(("late", clock.now)))
    clock.at(1.0, lambda: seen.append(("first", clock.now)))
    clock.at(1.0, lambda: seen.append(("second", clock.now)))
    clock.run()
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_a_cancelled_call_is_not_made_and_calls_may_plan_others() -> None:
    clock, seen = Clock(), []
    timer = clock.at(1.0, lambda: seen.append("cancelled"))
    clock.at(0.5, timer.cancel)
    clock.at(0.7, lambda: clock.after(0.1, lambda: seen.append(clock.now)))
    clock.run()
    assert seen == [pytest.approx(0.8)]


def test_the_past_cannot_be_planned() -> None:
    clock = Clock()
    clock.at(1.0, lambda: clock.at(0.5, lambda: None))
    with pytest.raises(Bug, match="planned something for"):
        clock.run()
