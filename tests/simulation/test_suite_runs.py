from __future__ import annotations

import pytest

from moonpool.sim.outcome import Load
from moonpool.sim.suite.cluster_runs import cluster_figures, cluster_of, highest_speed, swing
from moonpool.sim.suite.contenders import LOCAL, LOCAL_SHORTEST, OURS, OURS_FIFO, PAPER, RANDOM, Contender
from moonpool.sim.suite.published import LINK, PREFILL
from moonpool.sim.suite.rows.small import small_rows
from moonpool.sim.suite.settings import ClusterRun, SpeedRun
from moonpool.sim.suite.workload import Workload

MADE = Workload(trace="made", first=80, one_token=True)


def test_a_run_becomes_the_cluster_that_its_settings_say() -> None:
    run = ClusterRun(
        workload=Workload(trace="made"), prefill=5, decode=11, pool_tokens=300_000, ssd_tokens=3_000_000, kv_bytes=0.5,
        link_bytes_per_s=3e9, decode_slope="single", eviction="hazard", order="shortest", age=0.2, ttft_limit_s=10.0,
        prefill_factor=2.0, after_prefill_s=1.5,
    )  # fmt: skip
    cluster = cluster_of(run)
    counts = {group.role: (group.count, group.pool_tokens, group.ssd_tokens) for group in cluster.groups}
    assert counts["prefill"] == (5, 300_000, 3_000_000)
    assert counts["decode"][0] == 11
    assert cluster.model.kv_bytes_per_token == 163_840
    assert (cluster.prefill.a, cluster.prefill.d) == (2 * PREFILL[0], 2 * PREFILL[3])
    assert (cluster.link.bytes_per_s, cluster.decode.base_s, cluster.post_prefill_s) == (3e9, 0.0263, 1.5)
    assert (cluster.eviction, cluster.order, cluster.age, cluster.targets.ttft_s) == ("hazard", "shortest", 0.2, 10.0)
    assert not cluster.targets.sent


@pytest.mark.parametrize("share", [1.0, 0.5, 0.508, 0.3])
def test_compressed_kv_still_divides_into_layers(share: float) -> None:
    model = cluster_of(ClusterRun(workload=Workload(trace="made"), kv_bytes=share)).model
    assert model.kv_bytes_per_token == pytest.approx(327_680 * share, rel=0.002)
    assert model.layout(model.layers).block_bytes > 0


def test_what_is_not_said_is_the_papers_cluster() -> None:
    cluster = cluster_of(ClusterRun(workload=Workload(trace="made"), admission="early"))
    assert [(group.role, group.count) for group in cluster.groups] == [("prefill", 8), ("decode", 8)]
    assert (cluster.prefill.a, cluster.prefill.b, cluster.prefill.c, cluster.prefill.d) == PREFILL
    assert (cluster.link.bytes_per_s, cluster.ssd, cluster.targets.sent) == (LINK, None, True)


def test_a_run_serves_everybody_and_leaves_nothing_behind() -> None:
    figures = cluster_figures(OURS.run(MADE, prefill=2, decode=1), None)
    assert figures["requests"] == figures["served"] == 80
    assert figures["leaks"] == figures["failed"] == figures["refused"] == 0
    assert 0 < figures["p50_ttft_s"] <= figures["p90_ttft_s"] <= figures["max_ttft_s"]


def test_the_pool_beats_own_caches_and_both_beat_chance() -> None:
    def mean(one: Contender) -> float:
        return cluster_figures(one.run(MADE, prefill=2, decode=1), None)["mean_ttft_s"]

    random, local, paper = mean(RANDOM), mean(LOCAL), mean(PAPER)
    assert random > local >= paper


def test_contenders_differ_in_what_their_names_say() -> None:
    runs = [one.run(MADE, prefill=2, decode=1) for one in (LOCAL, LOCAL_SHORTEST, PAPER, OURS_FIFO, OURS)]
    assert len({run.model_dump_json() for run in runs}) == len(runs)


@pytest.mark.parametrize(("share", "speed"), [(0.0, 1.0), (1.01, 0.5)])
def test_the_highest_speed_lies_between_the_ends_it_was_given(share: float, speed: float) -> None:
    run = SpeedRun(base=OURS_FIFO.run(MADE, prefill=2, decode=1), share=share, least=0.5, most=1.0, step=0.25)
    assert highest_speed(run, None)["speed"] == pytest.approx(speed)


def load(at: float, prefill: float, decode: float) -> Load:
    return Load(at, 0, 0, 0, prefill, decode, 8, 8)


def test_a_steady_load_does_not_swing_and_a_swinging_one_does() -> None:
    steady = [load(5.0 * i, 0.5, 0.7) for i in range(200)]
    assert swing(steady, 1_000.0) == pytest.approx(0.0)
    anti = [load(5.0 * i, float(i // 6 % 2), 1.0 - i // 6 % 2) for i in range(200)]  # windows of 30 s take turns
    assert swing(anti, 1_000.0) == pytest.approx(0.5, abs=0.02)


def test_the_cold_start_and_what_comes_after_the_last_arrival_do_not_count_as_swing() -> None:
    quiet = [load(5.0 * i, 0.0 if i < 24 or i > 150 else 0.5, 0.5) for i in range(200)]
    assert swing(quiet, 750.0) == pytest.approx(0.0)
    assert swing([], 100.0) == 0.0


def test_the_small_rows_want_no_trace_but_their_own_where_none_is_given() -> None:
    for row in small_rows(traces=False):
        for run in row.runs:
            workload = getattr(run, "workload", None)
            assert workload is None or workload.trace == "made"
