"""Prefill nodes that share long prompts, on the virtual clock: how much sooner, at which price, and when one of them dies."""

from __future__ import annotations

import pytest
from support.sim_trace import BLOCK, conversations, small_cluster

from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import Fault, SimCluster
from moonpool.sim.outcome import Outcome
from moonpool.sim.run import simulate


def cluster(prefill: int, **values: object) -> SimCluster:
    return small_cluster().resized(prefill=prefill).changed(**values)


def replay(rows: list[TraceRow], machines: SimCluster, *, group: int) -> Outcome:
    outcome = simulate(rows, machines, policy=make_policy("moonpool", {"group": float(group)}))
    assert not any(outcome.leaks.values()), outcome.leaks
    return outcome


def long_prompts(count: int, *, every_s: float, blocks: int = 80) -> list[TraceRow]:
    return [
        TraceRow(i * every_s * 1e3, blocks * BLOCK, 4, tuple(range(i * blocks, (i + 1) * blocks)), i + 1) for i in range(count)
    ]


@pytest.mark.parametrize("keep", ["prefill", "decode"])
def test_on_a_quiet_cluster_four_nodes_compute_a_long_prompt_almost_four_times_as_fast(keep: str) -> None:
    rows = long_prompts(6, every_s=20.0)
    alone, shared = (replay(rows, cluster(4, keep=keep), group=group) for group in (0, 4))
    before, after = alone.figures()["ttft_mean_s"], shared.figures()["ttft_mean_s"]
    assert after < before / 3
    assert after > before / 4, "nobody computes faster than all of them together"
    assert shared.figures()["prefill_s"] < 1.15 * alone.figures()["prefill_s"]
    last = shared.requests[-1]
    assert last.predicted_ttft_s == pytest.approx((last.ttft_s or 0.0) - last.waited_s, rel=0.05)
    assert all(request.cached_tokens == 0 for request in shared.requests), "what helpers computed was not found"


def test_spans_that_take_longer_cost_what_they_take() -> None:
    rows = long_prompts(4, every_s=20.0)
    base = cluster(4)
    dear = base.changed(prefill=base.prefill.model_copy(update={"span_factor": 1.5}))
    cheap_s, dear_s = (replay(rows, one, group=4).figures()["ttft_mean_s"] for one in (base, dear))
    assert dear_s == pytest.approx(1.5 * cheap_s, rel=0.15)


def test_a_shared_prompt_is_found_by_the_next_turn() -> None:
    first = long_prompts(1, every_s=1.0)[0]
    again = TraceRow(30_000.0, first.input_length + 2 * BLOCK, 4, (*first.hash_ids, 900, 901), 2)
    outcome = replay([first, again], cluster(3), group=3)
    assert outcome.requests[1].cached_tokens == first.input_length


def test_under_load_sharing_does_no_harm() -> None:
    rows = conversations(80, seed=5, every_s=0.55, tokens=12_000)
    alone, shared = (replay(rows, cluster(3), group=group).figures() for group in (0, 3))
    assert shared["served"] == alone["served"] == len(rows)
    assert shared["ttft_mean_s"] < 1.02 * alone["ttft_mean_s"]
    assert shared["ttft_p99_s"] < 1.1 * alone["ttft_p99_s"]
    assert shared["prefill_s"] < 1.1 * alone["prefill_s"]


@pytest.mark.parametrize("node", ["p0", "p1", "p2"])
@pytest.mark.parametrize("at_s", [0.2, 1.5])
def test_a_prompt_outlives_each_worker_that_shares_it(node: str, at_s: float) -> None:
    machines = cluster(3, faults=(Fault(kind="worker", node=node, at_s=at_s, until_s=at_s + 3.0),))
    (request,) = replay(long_prompts(1, every_s=1.0), machines, group=3).requests
    assert request.served and request.failed is None
    assert request.attempts == 2


def test_a_link_that_is_cut_between_two_of_a_group_costs_one_attempt() -> None:
    faults = tuple(
        Fault(kind="link", node=one, other=other, at_s=0.5, until_s=2.0) for one, other in (("p0", "p1"), ("p1", "p2"))
    )
    (request,) = replay(long_prompts(1, every_s=1.0), cluster(3, faults=faults), group=3).requests
    assert request.served and request.attempts == 2
