from __future__ import annotations

import math

import pytest

from moonpool.scheduler.traffic import Rate, StepCost, Traffic

STEP = StepCost(0.02, 1e-3, 1e-6)


def test_a_steady_rate_is_its_mean_after_a_few_seconds_and_has_no_trend() -> None:
    rate = Rate()
    for tenth in range(300):
        rate.add(0.5, tenth / 10)
    assert rate.level(30.0) == pytest.approx(5.0, rel=0.01)
    assert rate.ahead(30.0, 30.0) == pytest.approx(5.0, rel=0.05)


def test_a_growing_rate_is_forecast_above_its_level_and_never_far_beyond_it() -> None:
    rate = Rate()
    for second in range(120):
        rate.add(second, float(second))
    level = rate.level(120.0)
    assert level == pytest.approx(120, rel=0.25)
    assert level * 1.1 < rate.ahead(30.0, 120.0) <= 2 * level


def test_a_rate_that_ended_fades_and_is_forgotten_after_a_long_silence() -> None:
    rate = Rate()
    for second in range(60):
        rate.add(10.0, float(second))
    assert rate.level(140.0) < 1.0
    rate.add(3.0, 1_000.0)
    assert rate.level(1_001.0) == pytest.approx(3.0)


def test_a_rate_says_something_from_the_first_event_on() -> None:
    rate = Rate()
    assert rate.level(5.0) == 0.0
    rate.add(2.0, 5.5)
    assert rate.level(5.6) > 0.0


def test_the_work_of_an_answer_is_what_its_steps_take_longer_for_it() -> None:
    alone = sum(STEP.per_sequence_s + STEP.per_token_s * (1_000 + i) for i in range(100))
    assert STEP.answer_s(1_000, 100) == pytest.approx(alone, rel=0.01)


def test_a_forecast_counts_workers_kept_busy() -> None:
    traffic = Traffic()
    for second in range(60):
        for _ in range(2):
            traffic.arrived(1_000, 600, 0.75, float(second))
            traffic.finished(100)
    seen = traffic.ahead(0.0, STEP, 60.0)
    assert seen.requests == pytest.approx(2.0, rel=0.02)
    assert seen.prompt_tokens == pytest.approx(2_000.0, rel=0.02)
    assert seen.computed_tokens == pytest.approx(1_200.0, rel=0.02)
    assert seen.prefill_work == pytest.approx(1.5, rel=0.02)
    assert seen.decode_work == pytest.approx(2.0 * STEP.answer_s(1_000, 100), rel=0.02)
    assert seen.answers == 120
    assert math.isclose(seen.output_tokens, 200.0, rel_tol=0.02)
