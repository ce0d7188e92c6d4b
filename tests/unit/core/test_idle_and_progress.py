"""Which gauges say that a process holds nothing, and when standing still is a fault."""

from __future__ import annotations

from moonpool.core.idle import is_idle, not_idle
from moonpool.core.progress import ProgressWatch, stuck


def test_a_process_is_idle_whatever_it_caches_and_busy_with_one_pin() -> None:
    assert is_idle({"pages_cached": 40, "pages_used": 0, "steps_count": 9, "pins": 0})
    assert not_idle({"pages_cached": 40, "pins": 2, "bookings": -1}) == {"pins": 2, "bookings": -1}


def test_a_loop_without_work_may_stand_still_for_ever() -> None:
    watch = ProgressWatch("computing", 5.0)
    watch.began(1.0)
    watch.ended(2.0)
    assert watch.at(1_000.0).good


def test_work_that_makes_no_progress_is_told_after_the_limit() -> None:
    watch = ProgressWatch("computing", 5.0)
    watch.began(1.0)
    assert watch.at(6.0).good
    assert not watch.at(6.1).good
    assert [p.name for p in stuck([watch.at(6.1)])] == ["computing"]


def test_a_saturated_loop_that_goes_on_is_alive() -> None:
    watch = ProgressWatch("computing", 5.0)
    for now in range(100):  # one piece begins before the other one ends, for a hundred seconds
        watch.began(now + 0.5)
        if now:
            watch.ended(now + 0.6)
    assert watch.at(101.0).good
    assert not watch.at(120.0).good
