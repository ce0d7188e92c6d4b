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


def test_bounds_are_quantiles_of_what_was_measured_over_what_was_estimated() -> None:
    estimate, rng = PrefillEstimate(), np.random.default_rng(7)
    for job in jobs(1_000, 7):
        estimate.add(measured(*job, noise=float(rng.lognormal(0, 0.2))))
    fit = estimate.fit
    for level, z in ((0.1, -1.2816), (0.5, 0.0), (0.9, 1.2816)):
        assert fit.ratio(level) == pytest.approx(np.exp(0.2 * z), abs=0.07)
    assert fit.ratio(0.05) < fit.ratio(0.1) < fit.ratio(0.9) < fit.ratio(0.95)
    assert fit.chance_over(fit.ratio(0.75)) == pytest.approx(0.25)
    assert fit.chance_over(0.1) == pytest.approx(0.95)
    assert fit.chance_over(10.0) == pytest.approx(0.05)


def test_what_nobody_has_measured_has_wide_bounds() -> None:
    fit = PrefillEstimate().fit
    assert fit.ratio(0.05) <= 0.2 and fit.ratio(0.95) >= 5.0


def test_a_fit_is_made_anew_once_in_a_few_dozen_measurements() -> None:
    estimate, rng, fits = PrefillEstimate(), np.random.default_rng(0), []
    for job in jobs(1_000, 0):
        estimate.add(measured(*job, noise=float(rng.lognormal(0, 0.1))))
        fits.append(estimate.fit.coefficients)
    assert len(set(fits)) < 50
    assert len(set(fits[500:])) < 13


def test_a_fit_that_errs_is_made_anew_at_once() -> None:
    estimate, rng = PrefillEstimate(), np.random.default_rng(0)
    for job in jobs(500, 0):
        estimate.add(measured(*job, noise=float(rng.lognormal(0, 0.1))))
        before = estimate.fit
    for job in jobs(12, 1):
        estimate.add(measured(*job, noise=3.0))
    assert estimate.fit.coefficients != before.coefficients
    assert estimate.fit.ratio(0.95) > 1.5


def test_larger_jobs_are_trusted_as_soon_as_they_were_measured() -> None:
    estimate = PrefillEstimate()
    for job in jobs(200, 0):
        estimate.add(measured(*job))
    assert estimate.fit.reach < 20_000
    estimate.add(measured(50_000, 0, 0))
    assert estimate.fit.reach == 200_000


def test_a_seed_decides_what_measurements_leave_open_and_gives_way_to_them() -> None:
    seed = (0.02, 4e-4, 3e-8, 2e-5)
    plain, seeded, wrong = PrefillEstimate(), PrefillEstimate(seed), PrefillEstimate([10 * x for x in seed])
    assert not seeded.fit.sure
    assert predicted(seeded.fit, *prefill_features(2_000, 500, 500)) == pytest.approx(measured(2_000, 500, 500).seconds)
    for estimate in (plain, seeded):
        for _ in range(MIN_SAMPLES):
            estimate.add(measured(1_000, 0, 0))
    far = prefill_features(30_000, 10_000, 10_000)
    errors = [abs(predicted(e.fit, *far) / measured(30_000, 10_000, 10_000).seconds - 1) for e in (plain, seeded)]
    assert errors[1] < 0.1 < errors[0]
    for job in jobs(300, 0):
        wrong.add(measured(*job))
    assert predicted(wrong.fit, *prefill_features(2_000, 0, 0)) == pytest.approx(measured(2_000, 0, 0).seconds, rel=0.1)


def test_what_came_from_other_nodes_is_not_taken_for_the_workers_own_time() -> None:
    local, fetched = PrefillEstimate(), PrefillEstimate()
    for n, p, loaded in jobs(100, 2):
        timing = measured(n, p, loaded)
        local.add(timing)
        away = PrefillTiming(n, p, timing.seconds + 3.0, timing.load_seconds + 3.0, loaded, fetch_seconds=3.0)
        fetched.add(away if loaded else timing)
    assert fetched.fit.coefficients == pytest.approx(local.fit.coefficients, rel=1e-3)


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
