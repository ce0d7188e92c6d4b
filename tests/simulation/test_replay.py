"""Whole replays on small simulated clusters: everybody is answered, nothing is left held, equal input gives equal output."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from support.sim_trace import BLOCK, conversations, small_cluster

from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import Fault, Group, Link, SimCluster, Ssd
from moonpool.sim.costs import prefill_s
from moonpool.sim.outcome import Outcome
from moonpool.sim.run import simulate

ROWS = conversations(150)


def replay(
    cluster: SimCluster, rows: list[TraceRow] = ROWS, *, policy: str = "pooled_min_ttft", admission: str = "none"
) -> Outcome:
    return simulate(rows, cluster, policy=make_policy(policy), admission=make_admission(admission))


def group(role: str, **values: int) -> Group:
    return Group.model_validate({"role": role, "count": 2, "pool_tokens": 200_000, "device_tokens": 200_000, **values})


CLUSTERS: dict[str, SimCluster] = {
    "kept-at-prefill": small_cluster(),
    "kept-at-decode": small_cluster(keep="decode"),
    "kept-at-both": small_cluster(keep="both"),
    "role-both": small_cluster(groups=(group("both"), group("both")), keep="decode"),
    "ssd-through": small_cluster(
        groups=(group("prefill", pool_tokens=40_000, ssd_tokens=400_000), group("decode")),
        ssd=Ssd(read_bytes_per_s=5e9, write_bytes_per_s=5e9),
    ),
    "ssd-back": small_cluster(
        groups=(group("prefill", pool_tokens=40_000, ssd_tokens=100_000), group("decode")),
        ssd=Ssd(read_bytes_per_s=5e9, write_bytes_per_s=2e9, write="back"),
    ),
    "few-pages": small_cluster(groups=(group("prefill", device_tokens=60_000), group("decode", device_tokens=60_000))),
    "slow-lossy-links": small_cluster(link=Link(bytes_per_s=2e9, latency_s=0.01, loss=0.02)),
    "chunks-and-noise": small_cluster(
        prefill=small_cluster().prefill.model_copy(update={"chunk_tokens": 2_048, "chunk_factor": 1.2}), noise=0.2
    ),
    "shortest-first": small_cluster(order="shortest"),
}


@pytest.mark.parametrize("name", list(CLUSTERS))
def test_everybody_is_answered_and_nothing_is_left_held(name: str) -> None:
    outcome = replay(CLUSTERS[name])
    figures = outcome.figures()
    assert figures["served"] == len(ROWS), figures
    assert {what: n for what, n in outcome.leaks.items() if n} == {}
    for row, result in zip(ROWS, outcome.requests, strict=True):
        assert result.ttft_s is not None and result.ended is not None
        assert result.cached_tokens <= row.input_length - 1
        assert (result.tbt_s is None) == (row.output_length == 1)
        assert result.ended - result.arrived >= result.ttft_s - 1e-9


@pytest.mark.parametrize("keep", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("kind", "node"), [("worker", "p0"), ("worker", "d0"), ("store", "p1"), ("store", "d1"), ("node", "d0")]
)
def test_whatever_breaks_everybody_is_answered_by_the_others(kind: str, node: str, keep: str) -> None:
    faults = tuple(
        Fault.model_validate({"kind": kind, "node": node, "at_s": at, "until_s": at + 8.0}) for at in (9.1, 30.2, 52.3)
    )
    outcome = replay(small_cluster(faults=faults, keep=keep))
    assert outcome.figures()["served"] == len(ROWS)
    assert {what: n for what, n in outcome.leaks.items() if n} == {}


def test_attempts_on_a_dead_worker_are_begun_anew_and_what_was_streamed_is_not_asked_for_twice() -> None:
    at = 30.2
    outcome = replay(small_cluster(faults=(Fault(kind="worker", node="d0", at_s=at),), detect_s=0.5))
    again = [r for r in outcome.requests if r.attempts > 1]
    assert again and outcome.counters["attempts_failed"] == len(again)
    assert all(r.decode == "decode-d1" and r.ended is not None and r.ended > at + 0.5 for r in again)
    streaming = [r for r in again if r.arrived + (r.ttft_s or 0.0) < at]
    assert streaming, "none had its first token before the failure"


def test_a_cut_link_costs_fetches_and_hand_offs_but_no_answer() -> None:
    faults = (
        Fault(kind="link", node="p0", other="p1", at_s=5.0, until_s=60.0),
        Fault(kind="link", node="p0", other="d0", at_s=20.0, until_s=40.0),
    )
    outcome = replay(small_cluster(faults=faults, link=Link(bytes_per_s=2e9)))
    assert outcome.figures()["served"] == len(ROWS)
    assert outcome.counters["attempts_failed"] > 0
    assert {what: n for what, n in outcome.leaks.items() if n} == {}


def test_equal_input_gives_equal_output() -> None:
    cluster = small_cluster(noise=0.1)
    one, two = (replay(cluster, policy="moonpool", admission="moonpool") for _ in range(2))
    assert [asdict(r) for r in one.requests] == [asdict(r) for r in two.requests]
    assert [asdict(at) for at in one.load] == [asdict(at) for at in two.load]
    assert one.figures() == two.figures()
    other = simulate(ROWS, cluster, policy=make_policy("moonpool"), admission=make_admission("moonpool"), seed=1)
    assert other.figures() != one.figures()


def test_one_prompt_on_an_idle_cluster_takes_what_the_formulas_say() -> None:
    cluster = small_cluster(post_prefill_s=0.25)
    ids = tuple(range(20))
    rows = [TraceRow(0.0, 20 * BLOCK - 7, 11, ids, 1), TraceRow(60_000.0, 20 * BLOCK - 7, 11, ids, 2)]
    first, again = replay(cluster, rows).requests
    tokens, cached = 20 * BLOCK - 7, 19 * BLOCK
    assert first.ttft_s == pytest.approx(prefill_s(cluster.prefill, tokens, 0) + 0.25)
    assert again.ttft_s == pytest.approx(prefill_s(cluster.prefill, tokens, cached) + 0.25)
    assert (first.cached_tokens, again.cached_tokens) == (0, cached)
    last_step = cluster.decode.base_s + cluster.decode.per_token_s * (tokens + 10)
    assert first.tbt_s == pytest.approx(last_step)


def test_a_prompt_cached_whole_has_its_last_token_computed() -> None:
    cluster = small_cluster()
    rows = [TraceRow(at, 4 * BLOCK, 1, (0, 1, 2, 3), 1) for at in (0.0, 30_000.0)]
    _, again = replay(cluster, rows).requests
    assert again.cached_tokens == 4 * BLOCK - 1
    assert again.ttft_s == pytest.approx(prefill_s(cluster.prefill, 4 * BLOCK, 4 * BLOCK - 1))


def test_twice_the_speed_halves_arrivals_and_spreading_takes_bursts_apart() -> None:
    rows = [TraceRow(3_000.0 * (n // 4), 1_000, 3, (n,) * 0 + (n, 1_000 + n), n + 1) for n in range(12)]
    plain, fast = simulate(rows, small_cluster()), simulate(rows, small_cluster(), speed=2.0)
    spread = simulate(rows, small_cluster(), bursts="spread")
    assert [r.arrived for r in fast.requests] == [r.arrived / 2 for r in plain.requests]
    assert len({r.arrived for r in plain.requests}) == 3
    assert len({r.arrived for r in spread.requests}) == 12


def test_progress_counts_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    simulate(ROWS[:20], small_cluster(), on_progress=lambda *at: told.append(at))
    assert told == [(n, 20) for n in range(1, 21)]


def test_a_known_replay_comes_to_known_figures() -> None:
    """With turns taken, no estimate has a say: what changes here is a queue, a pool, a batcher, a hand-off or a formula."""
    rows, cluster = conversations(120, seed=5), small_cluster(noise=0.05)
    outcome = simulate(rows, cluster, policy=make_policy("round_robin"), admission=make_admission("none"), seed=2)
    known = {
        "served": 120.0,
        "hit_share": 0.415556307,
        "prefill_s": 88.409315536,
        "waited_mean_s": 0.992907615,
        "ttft_mean_s": 1.729651911,
        "ttft_p99_s": 6.530931685,
        "tbt_mean_s": 0.030478626,
        "decode_steps": 3862.0,
        "seconds": 66.885688999,
    }
    assert {name: value for name, value in outcome.figures().items() if name in known} == pytest.approx(known, rel=1e-6)


def test_sequences_that_outgrow_the_pages_are_preempted_computed_again_and_answered() -> None:
    rows = [TraceRow(100.0 * n, 1_000, 2_000, (2 * n, 2 * n + 1), n + 1) for n in range(12)]
    plain = small_cluster()
    wide = replay(plain, rows)
    decode = plain.decode.model_copy(update={"growth_reserve": 0.0})
    narrow = replay(plain.changed(groups=(group("prefill"), group("decode", device_tokens=14_000)), decode=decode), rows)
    assert narrow.figures()["served"] == 12.0
    assert narrow.counters["preemptions"] > 0 == wide.counters["preemptions"]
    assert {what: n for what, n in narrow.leaks.items() if n} == {}
    slowest = [max(r.tbt_s or 0.0 for r in outcome.requests) for outcome in (wide, narrow)]
    assert slowest[1] > slowest[0]
    assert sum(r.wasted_s for r in narrow.requests) == 0.0
