from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.membership import PrefillTiming, StepTiming
from moonpool.scheduler.estimates import MIN_SAMPLES, Fit, Overhead, PrefillEstimate, StepEstimate


def predicted(fit: Fit, *features: float) -> float:
    return float(np.dot(fit.coefficients, features))


def prefill_features(n: int, p: int, loaded: int) -> tuple[float, ...]:
    return 1.0, n - p, n * n - p * p, loaded


def measured(n: int, p: int, loaded: int, noise: float = 1.0) -> PrefillTiming:
    seconds = (0.02 + 4e-4 * (n - p) + 3e-8 * (n * n - p * p) + 2e-5 * loaded) * noise
    return PrefillTiming(n, p, seconds, loaded_tokens=loaded)


def jobs(count: int, seed: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        n = int(rng.integers(10, 4_000))
        p = int(rng.integers(0, n)) if rng.random() < 0.5 else 0
        out.append((n, p, p if rng.random() < 0.5 else 0))
    return out


def test_a_fresh_estimate_is_unsure_and_still_ranks_jobs() -> None:
    fit = PrefillEstimate().fit
    assert not fit.sure
    assert predicted(fit, *prefill_features(1_000, 0, 0)) > predicted(fit, *prefill_features(1_000, 900, 900))
    assert not StepEstimate().fit.sure


def test_it_becomes_sure_with_enough_measurements() -> None:
    estimate = PrefillEstimate()
    for i in range(MIN_SAMPLES):
        assert not estimate.fit.sure
        estimate.add(measured(100 + i, 0, 0))
    assert estimate.fit.sure


@pytest.mark.parametrize("seed", range(3))
def test_prefill_times_are_recovered_from_noisy_measurements(seed: int) -> None:
    estimate, rng = PrefillEstimate(), np.random.default_rng(seed)
    for job in jobs(300, seed):
        estimate.add(measured(*job, noise=float(rng.lognormal(0, 0.1))))
    for job in jobs(50, seed + 100):
        assert predicted(estimate.fit, *prefill_features(*job)) == pytest.approx(measured(*job).seconds, rel=0.1)
    assert 0.04 < estimate.fit.spread < 0.2


def test_cold_first_runs_do_not_bend_the_fit() -> None:
    estimate = PrefillEstimate()
    for job in jobs(3, 0):
        estimate.add(measured(*job, noise=6.0))
    for job in jobs(60, 1):
        estimate.add(measured(*job))
    assert predicted(estimate.fit, *prefill_features(2_000, 0, 0)) == pytest.approx(measured(2_000, 0, 0).seconds, rel=0.05)


def test_many_jobs_of_one_kind_do_not_push_out_the_others() -> None:
    estimate = PrefillEstimate()
    for job in jobs(60, 0):
        estimate.add(measured(*job))
    for _ in range(5_000):
        estimate.add(measured(64, 0, 0))
    assert predicted(estimate.fit, *prefill_features(3_500, 0, 0)) == pytest.approx(measured(3_500, 0, 0).seconds, rel=0.05)


def test_a_machine_that_became_slower_is_followed() -> None:
    estimate = PrefillEstimate()
    for noise in (1.0, 2.0):
        for job in jobs(400, 3):
            estimate.add(measured(*job, noise=noise))
    assert predicted(estimate.fit, *prefill_features(2_000, 0, 0)) == pytest.approx(2 * measured(2_000, 0, 0).seconds, rel=0.1)


def test_equal_jobs_alone_give_their_own_time_and_more_for_longer_ones() -> None:
    estimate = PrefillEstimate()
    for _ in range(8):
        estimate.add(measured(600, 0, 0))
    half, same, double = (predicted(estimate.fit, *prefill_features(n, 0, 0)) for n in (300, 600, 1_200))
    assert same == pytest.approx(measured(600, 0, 0).seconds, rel=0.01)
    assert half < same < double


def test_load_seconds_without_a_token_count_charge_all_cached_tokens() -> None:
    counted, uncounted = PrefillEstimate(), PrefillEstimate()
    for n, p, _ in jobs(40, 5):
        counted.add(measured(n, p, p))
        uncounted.add(PrefillTiming(n, p, measured(n, p, p).seconds, load_seconds=0.1 if p else 0.0))
    assert uncounted.fit.coefficients == pytest.approx(counted.fit.coefficients, rel=1e-6)


def test_step_times_are_recovered() -> None:
    estimate, rng = StepEstimate(), np.random.default_rng(1)
    for _ in range(500):
        batch = int(rng.integers(1, 17))
        context = batch * int(rng.integers(100, 2_000))
        estimate.add(StepTiming(batch, context, (0.02 + 1e-3 * batch + 2e-7 * context) * float(rng.lognormal(0, 0.1))))
    assert predicted(estimate.fit, 1, 12, 10_000) == pytest.approx(0.034, rel=0.06)
    assert estimate.fit.reach == pytest.approx(4 * 32_000, rel=0.1)


timings = st.builds(
    PrefillTiming,
    prompt_tokens=st.integers(0, 200_000),
    cached_tokens=st.integers(0, 200_000),
    seconds=st.floats(allow_nan=True, allow_infinity=True, min_value=None, max_value=None),
    load_seconds=st.floats(0, 10),
    loaded_tokens=st.integers(0, 200_000),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(timings, max_size=30))
def test_whatever_is_reported_coefficients_stay_finite_and_non_negative(reported: list[PrefillTiming]) -> None:
    estimate = PrefillEstimate()
    for timing in reported:
        estimate.add(timing)
    fit = estimate.fit
    assert all(np.isfinite(c) and c >= 0 for c in fit.coefficients)
    assert 0 <= fit.spread <= 1


def test_overhead_is_the_median_of_what_was_seen_and_never_negative() -> None:
    overhead = Overhead()
    assert overhead.seconds == 0
    for seconds in (0.01, 0.02, 5.0, float("nan"), float("inf")):
        overhead.add(seconds)
    assert overhead.seconds == 0.02
    for _ in range(20):
        overhead.add(-1.0)
    assert overhead.seconds == 0
