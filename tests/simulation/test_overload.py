"""Several times more requests than a small cluster can serve, with limits that requests carry."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sim_trace import conversations, small_cluster

from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import TargetsS
from moonpool.sim.outcome import Outcome
from moonpool.sim.run import simulate


def warm_then_flooded() -> list[TraceRow]:
    """Forty requests that a cluster can serve and learn from, then five times what it can."""
    calm = conversations(40, seed=5, every_s=2.0, tokens=24_000, answers=250)
    flood = conversations(220, seed=3, every_s=0.15, tokens=24_000, answers=250)
    begin = calm[-1].timestamp_ms
    return calm + [
        replace(row, timestamp_ms=begin + row.timestamp_ms, hash_ids=tuple(10**6 + one for one in row.hash_ids))
        for row in flood
    ]


FIVE_TIMES = warm_then_flooded()
CLUSTER = small_cluster(targets=TargetsS(ttft_s=5.0, tbt_s=0.08))


def replay(admission: str, rows: list[TraceRow] = FIVE_TIMES, policy: str = "moonpool") -> Outcome:
    return simulate(rows, CLUSTER, policy=make_policy(policy), admission=make_admission(admission))


@pytest.mark.parametrize("policy", ["moonpool", "algorithm1"])
def test_who_is_accepted_meets_the_targets_and_who_is_refused_costs_nothing(policy: str) -> None:
    outcome = replay("moonpool", policy=policy)
    refused = [r for r in outcome.requests if r.refused is not None]
    accepted = [r for r in outcome.requests if r.refused is None]
    assert len(refused) > 100
    assert all(r.prefill_s == 0.0 and r.refused_at == r.arrived for r in refused)
    assert sum(r.met(5.0, 0.08) for r in accepted) >= 0.99 * len(accepted)
    assert {what: n for what, n in outcome.leaks.items() if n} == {}


def test_more_meet_their_targets_than_under_the_published_rules_and_nothing_is_computed_in_vain() -> None:
    ours = replay("moonpool").figures()
    others = {name: replay(name).figures() for name in ("baseline", "early", "early_predicted")}
    for name, theirs in others.items():
        assert ours["met"] >= theirs["met"], name
        assert ours["met_tokens"] >= theirs["met_tokens"], name
    assert ours["wasted_prefill_s"] == 0.0
    assert others["baseline"]["wasted_prefill_s"] > 5.0


def test_a_giant_prompt_is_let_into_an_idle_cluster_and_short_ones_after_it() -> None:
    rows = [
        TraceRow(0.0, 100_000, 20, tuple(range(196)), 1),
        *(TraceRow(100.0 + i, 600, 20, (1_000 + i, 2_000 + i), 2 + i) for i in range(8)),
    ]
    cluster = CLUSTER.changed(targets=TargetsS(ttft_s=30.0, tbt_s=0.1))
    outcome = simulate(rows, cluster, policy=make_policy("moonpool"), admission=make_admission("moonpool"))
    assert all(r.refused is None and r.met(30.0, 0.1) for r in outcome.requests)
