"""What an answer can bear, against the definition of TBT itself."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.gaps import KEPT, MOST_SHARE, STEADY_SHARE, Gaps, Room, tightest
from moonpool.loadgen.record import slowest_tenth

GAPS = st.lists(st.floats(0.0, 1.0), max_size=60)


def answer(gaps: list[float]) -> Gaps:
    told = Gaps(10.0)
    now = 10.0
    for gap in gaps:
        now += gap
        told.told(now)
    return told


@given(gaps=GAPS, target=st.floats(0.01, 1.0))
def test_the_longest_gap_is_the_one_with_which_the_target_is_just_met(gaps: list[float], target: float) -> None:
    longest = answer(gaps).longest_s(target)
    if longest > 1e-6:
        assert slowest_tenth([*gaps, longest]) <= target * (1 + 1e-6) + 1e-6
    over = slowest_tenth([*gaps, longest + 1e-3])
    assert over is not None
    assert over > target - 1e-6


@given(st.data())
def test_an_answer_that_never_waits_longer_than_it_can_bear_meets_its_target(data: st.DataObject) -> None:
    told, gaps, now = Gaps(0.0), [], 0.0
    for _ in range(data.draw(st.integers(1, 80))):
        gaps.append(data.draw(st.floats(0.0, 1.0)) * told.longest_s(0.05))
        now += gaps[-1]
        told.told(now)
    assert slowest_tenth(gaps) <= 0.05 * (1 + 1e-6)


def test_of_a_long_answer_no_more_gaps_are_remembered_than_are_needed() -> None:
    told = answer([0.001] * 5_000)
    assert told.longest_s(0.1) == pytest.approx(KEPT * 0.1 - (KEPT - 1) * 0.001)
    told.told(10.0 + 5.0 + 3.0)
    assert told.longest_s(0.1) == pytest.approx(KEPT * 0.1 - 3.0 - (KEPT - 2) * 0.001, abs=1e-6)


def test_time_already_waited_is_gone_and_a_missed_target_leaves_nothing() -> None:
    told = answer([0.01] * 3)
    steady, most = told.room(0.1, 10.03).steady_s, told.room(0.1, 10.03).most_s
    assert (steady, most) == (pytest.approx(STEADY_SHARE * 0.1), pytest.approx(MOST_SHARE * 0.1))
    assert told.room(0.1, 10.07).steady_s == pytest.approx(STEADY_SHARE * 0.1 - 0.04)
    assert told.room(0.1, 11.0) == Room(0.0, 0.0)
    slow = answer([1.0]).room(0.1, 11.0)
    assert slow == Room(pytest.approx(STEADY_SHARE * 0.1), pytest.approx(STEADY_SHARE * 0.1)), "it missed its target"
    assert told.room(inf, 11.0).free


def test_the_tightest_of_several_answers_counts_and_of_none_there_is_room_without_end() -> None:
    assert tightest([Room(0.1, 0.5), Room(0.2, 0.3)]) == Room(0.1, 0.3)
    assert tightest([]).free
