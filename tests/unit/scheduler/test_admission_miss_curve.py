from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.scheduler.admission.miss_curve import MissCurve, never_falling

outcomes = st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 3.0)), max_size=200)


def test_before_any_outcome_only_what_surely_misses_counts_as_a_miss() -> None:
    curve = MissCurve()
    assert curve.chance(0.9) < 0.01
    assert curve.chance(1.1) > 0.99
    assert 0.9 < curve.highest(0.1) < 1.0


def test_predictions_that_are_too_low_lower_the_highest_ratio_let_in() -> None:
    curve = MissCurve()
    for _ in range(320):
        curve.add(0.8, 0.8 * 1.2)
    assert curve.chance(0.8) < 0.02
    assert curve.chance(0.9) > 0.3
    assert curve.highest(0.1) < 0.9


def test_predictions_that_are_too_high_raise_it_beyond_what_was_ever_let_in() -> None:
    curve = MissCurve()
    for _ in range(320):
        curve.add(0.95, 0.95 * 0.8)
    assert curve.highest(0.1) > 1.05


def test_what_happened_outweighs_what_the_errors_say() -> None:
    curve = MissCurve()
    for i in range(1_600):
        curve.add(0.8, 1.01 if i % 2 else 0.7)
    assert curve.chance(0.825) == pytest.approx(0.5, abs=0.02)


def test_old_outcomes_fade() -> None:
    curve = MissCurve()
    for _ in range(160):
        curve.add(0.8, 1.5)
    assert curve.chance(0.825) > 0.9
    for _ in range(6_000):
        curve.add(0.8, 0.8)
    assert curve.chance(0.825) < 0.05


@pytest.mark.parametrize(("ratio", "measured"), [(float("nan"), 1.0), (0.8, float("inf")), (0.0, 1.0), (-1.0, 1.0)])
def test_impossible_outcomes_change_nothing(ratio: float, measured: float) -> None:
    curve = MissCurve()
    for _ in range(64):
        curve.add(ratio, measured)
    assert curve.chance(0.9) < 0.01


@settings(max_examples=100, deadline=None)
@given(outcomes, st.floats(0.01, 0.9))
def test_the_chance_never_falls_and_the_highest_ratio_keeps_to_it(seen: list[tuple[float, float]], wanted: float) -> None:
    curve = MissCurve()
    for ratio, measured in seen:
        curve.add(ratio, measured)
    chances = [curve.chance(ratio) for ratio in np.linspace(0.0, 2.5, 120)]
    assert all(0.0 <= chance <= 1.0 for chance in chances)
    assert all(a <= b + 1e-12 for a, b in pairwise(chances))
    highest = curve.highest(wanted)
    if 0.0 < highest < np.inf:
        assert curve.chance(highest - 1e-6) <= wanted + 1e-9
        assert curve.chance(highest + 0.05) >= wanted - 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_pooling_equals_the_formula_of_minima_over_maxima(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))

    def mean(first: int, last: int) -> float:
        return float(np.average(values[first : last + 1], weights=weights[first : last + 1]))

    n = len(values)
    expected = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    assert never_falling(values, weights) == pytest.approx(expected, abs=1e-9)
