from __future__ import annotations

import pytest
from support.cluster_of_members import BLOCK, keys, prefill_seconds, split, step_seconds

from moonpool.core.errors import Reason
from moonpool.core.events import Tier
from moonpool.core.membership import LiveAttempt, PrefillTiming, StepTiming
from moonpool.core.placement import Placement, Refusal


def test_a_ttft_target_is_refused_under_load_and_met_at_half_of_it_and_when_idle() -> None:
    cluster = split(prefills=1, taught=True)
    target = 1e3 * (6 * prefill_seconds(500) + prefill_seconds(500))

    def queued(jobs: int) -> None:
        cluster.report("prefill-0", [LiveAttempt(f"x{i}", 1, 500, 500) for i in range(jobs)])

    queued(10)
    refusal = cluster.place("r", 500, ttft_ms=target)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.TARGETS_MISSED
    assert "predicted time to first token 56" in refusal.message
    assert f"target {target:.0f} ms" in refusal.message
    assert "waiting at prefill-0" in refusal.message
    assert cluster.gauge("bookings") == 0, "a refused request books nothing"
    queued(5)
    assert isinstance(cluster.place("r", 500, ttft_ms=target), Placement)
    cluster.finish("r")
    queued(0)
    assert isinstance(cluster.place("r", 500, ttft_ms=target), Placement)


def test_retry_after_is_when_enough_of_the_queue_has_drained() -> None:
    cluster = split(prefills=1, taught=True)
    cluster.report("prefill-0", [LiveAttempt("x", 1, 4_000, 4_000)])
    refusal = cluster.place("r", 500, ttft_ms=2_000)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == pytest.approx(prefill_seconds(4_000) + prefill_seconds(500) - 2.0, rel=0.05)
    cluster.now += refusal.retry_after_s + 0.1
    assert isinstance(cluster.place("r", 500, ttft_ms=2_000), Placement), "the queue drains while nobody reports"


def test_a_prompt_that_even_an_idle_worker_computes_too_slowly_is_told_so() -> None:
    refusal = split(taught=True).place("r", 4_000, ttft_ms=1_000)
    assert isinstance(refusal, Refusal)
    assert "an idle worker would miss it too" in refusal.message
    assert refusal.retry_after_s > 0


def test_a_cached_prefix_makes_a_target_that_computing_all_would_miss() -> None:
    cluster = split(taught=True)
    prompt = keys(1, 240)
    assert isinstance(cluster.place("cold", 240 * BLOCK + 1, prompt=prompt, ttft_ms=500), Refusal)
    cluster.stored("prefill-1", prompt, tier=Tier.G1)
    warm = cluster.place("warm", 240 * BLOCK + 1, prompt=prompt, ttft_ms=500)
    assert isinstance(warm, Placement)
    assert warm.prefill.id == "prefill-1"


def test_the_spread_of_the_measurements_is_added_before_refusing() -> None:
    cluster = split(prefills=1)
    cluster.report(
        "prefill-0",
        prefills=[PrefillTiming(n, 0, prefill_seconds(n) * f) for n in (200, 500, 1_000) for f in (0.7, 0.8, 1.0, 1.2, 1.3)],
    )
    likely = 1e3 * prefill_seconds(500)
    assert isinstance(cluster.place("tight", 500, ttft_ms=likely * 1.02), Refusal)
    assert isinstance(cluster.place("wide", 500, ttft_ms=likely * 1.5), Placement)


def test_a_job_far_larger_than_any_measured_is_not_refused() -> None:
    cluster = split(prefills=1)
    cluster.report("prefill-0", prefills=[PrefillTiming(n, 0, prefill_seconds(n)) for n in (50, 60, 70, 80, 90)])
    assert isinstance(cluster.place("near", 300, ttft_ms=10), Refusal)
    assert isinstance(cluster.place("far", 4_000, ttft_ms=10), Placement)


def test_a_tbt_target_is_refused_on_a_full_batch_and_met_when_it_will_have_emptied() -> None:
    cluster = split(prefills=1, taught=True)
    target = 1e3 * step_seconds(8, 8_000)
    running = [LiveAttempt(f"x{i}", 1, 1_000, 400) for i in range(12)]
    cluster.report("decode-0", running)
    refusal = cluster.place("r", 500, tbt_ms=target)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.TARGETS_MISSED
    assert "predicted time between tokens" in refusal.message
    assert "decode-0" in refusal.message
    assert refusal.retry_after_s == pytest.approx(400 * step_seconds(13, 12_500), rel=0.1)
    soon_done = [LiveAttempt(f"x{i}", 1, 1_000, 5 if i < 6 else 400) for i in range(12)]
    cluster.report("decode-0", soon_done)
    assert isinstance(cluster.place("r", 500, tbt_ms=target), Placement), "six leave before this prefill ends"


def test_a_second_decode_worker_takes_what_the_first_would_make_too_slow() -> None:
    cluster = split(prefills=1, decodes=2, taught=True)
    cluster.report("decode-0", [LiveAttempt(f"x{i}", 1, 1_000, 400) for i in range(12)])
    placement = cluster.place("r", 500, tbt_ms=1e3 * step_seconds(2, 600))
    assert isinstance(placement, Placement)
    assert placement.decode.id == "decode-1"


def test_a_worker_without_own_measurements_is_judged_by_its_role() -> None:
    cluster = split(prefills=1, taught=True)
    cluster.change("prefill-0", ready=False)
    cluster.join("prefill-9", cluster.members["prefill-0"].role, "a")
    refusal = cluster.place("r", 1_000, ttft_ms=100)
    assert isinstance(refusal, Refusal)
    assert "prefill-9" in refusal.message


def test_a_worker_back_in_a_new_life_is_judged_by_what_its_role_measured() -> None:
    cluster = split(prefills=1, taught=True)
    cluster.join("prefill-0", cluster.members["prefill-0"].role, "a")
    assert isinstance(cluster.place("r", 1_000, ttft_ms=100), Refusal)


def test_time_outside_the_workers_is_learned_from_what_the_gateway_measured() -> None:
    cluster = split(prefills=1, taught=True)
    for i in range(5):
        predicted = cluster.placed(f"r{i}", 500).predicted_ttft_ms
        cluster.finish(f"r{i}", ttft_ms=1e3 * prefill_seconds(500) + 80)
        cluster.now += 1
    assert predicted == pytest.approx(1e3 * prefill_seconds(500) + 80, rel=0.02)
    assert isinstance(cluster.place("r", 500, ttft_ms=1e3 * prefill_seconds(500) + 60), Refusal)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_measurements_are_ignored(seconds: float) -> None:
    cluster = split(prefills=1, taught=True)
    before = cluster.placed("before", 500).predicted_ttft_ms
    cluster.report("prefill-0", prefills=[PrefillTiming(500, 0, seconds)] * 9)
    cluster.report("decode-0", steps=[StepTiming(1, 500, seconds)] * 9)
    cluster.finish("before", ttft_ms=seconds)
    assert cluster.placed("after", 500).predicted_ttft_ms == pytest.approx(before)


def test_an_idle_cluster_that_measured_nothing_for_long_lets_one_in_to_measure_again() -> None:
    cluster = split(taught=True)
    assert isinstance(cluster.place("a", 4_000, ttft_ms=1_000), Refusal)
    cluster.now += 31.0
    cluster.report("prefill-0", [LiveAttempt("x", 1, 500, 500)])
    assert isinstance(cluster.place("b", 4_000, ttft_ms=1_000), Refusal), "somebody else will measure"
    cluster.report("prefill-0")
    assert isinstance(cluster.place("c", 4_000, ttft_ms=1_000), Placement)
    cluster.finish("c")
    assert isinstance(cluster.place("d", 4_000, ttft_ms=1_000), Refusal), "one is enough"
    assert cluster.gauge("admitted_to_measure") == 1
