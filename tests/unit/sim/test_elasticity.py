"""Roles that follow the traffic and prompts computed where they are decoded, in the simulator with the production objects."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.planner import Planner, Settings
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import SimCluster, TargetsS
from moonpool.sim.outcome import Outcome
from moonpool.sim.run import simulate

SETTLED_S = 70.0
PLANNING = Settings(ttft_s=2.0, tbt_s=0.06, warm_s=5.0, hold_s=4.0, settle_s=5.0)


def cluster(prefill: int, decode: int) -> SimCluster:
    pool: dict[str, Any] = {"pool_tokens": 100_000, "device_tokens": 1_000_000}
    return SimCluster.model_validate(
        {
            "groups": ({"role": "prefill", "count": prefill, **pool}, {"role": "decode", "count": decode, **pool}),
            "model": {"name": "m", "layers": 4, "kv_bytes_per_token": 64},
            "prefill": {"a": 0.05, "b": 4e-4, "c": 0.0},
            "decode": {"base_s": 0.02, "per_sequence_s": 2e-3, "per_token_s": 1e-6, "chunk_tokens": 512},
            "link": {"bytes_per_s": 1e9},
            "targets": {"ttft_s": 2.0, "tbt_s": 0.06},
            "switch_s": 1.0,
        }
    )


def trace(seconds: int = 120, per_second: int = 2, prompt: int = 3_500, output: int = 25) -> list[TraceRow]:
    """Work for three prefill workers, and little to decode."""
    return [
        TraceRow(1e3 * i / per_second, prompt + 10 * (i % 7), output, tuple(range(10 * i, 10 * i + -(-(prompt + 60) // 512))))
        for i in range(seconds * per_second)
    ]


def replayed(prefill: int, decode: int, *, planner: bool, policy: str = "moonpool") -> Outcome:
    return simulate(
        trace(),
        cluster(prefill, decode),
        policy=make_policy(policy),
        admission=make_admission("none"),
        planner=Planner(PLANNING) if planner else None,
    )


def share_late(outcome: Outcome) -> float:
    late = [request for request in outcome.requests if request.arrived >= SETTLED_S]
    return sum(request.met(2.0, 0.06) for request in late) / len(late)


@pytest.mark.parametrize("prefill", [1, 5])
def test_from_any_split_the_roles_follow_and_nothing_is_lost(prefill: int) -> None:
    outcome = replayed(prefill, 6 - prefill, planner=True)
    assert share_late(outcome) >= 0.98
    assert all(request.served for request in outcome.requests)
    assert not any(outcome.leaks.values()), outcome.leaks


def test_without_a_planner_too_few_prefill_workers_stay_too_few() -> None:
    fixed = replayed(1, 5, planner=False)
    assert share_late(fixed) < 0.5
    assert fixed.counters["switches"] == 0


def test_equal_arguments_switch_the_same_workers_at_the_same_times() -> None:
    one, other = (replayed(1, 5, planner=True) for _ in range(2))
    assert [(load.at, load.prefill_workers) for load in one.load] == [(load.at, load.prefill_workers) for load in other.load]
    assert one.figures() == other.figures()


def test_short_prompts_are_computed_where_they_are_decoded_while_prefill_workers_are_busy() -> None:
    rows = [
        row if i % 3 else TraceRow(row.timestamp_ms, 300, 25, ())
        for i, row in enumerate(trace(seconds=40, per_second=2, prompt=3_000))
    ]
    outcomes = {}
    for colocate in (0.0, 1_024.0):
        outcomes[colocate] = simulate(
            rows,
            cluster(1, 2).changed(targets=TargetsS(ttft_s=2.0, tbt_s=0.3)),
            policy=make_policy("moonpool", {"colocate": colocate}),
            admission=make_admission("none"),
        )
    split, colocated = outcomes.values()
    assert not any(request.prefill == request.decode for request in split.requests)
    here = [request for request in colocated.requests if request.prefill == request.decode]
    assert here and all(request.prompt_tokens <= 1_024 for request in here)
    assert all(request.served for request in colocated.requests)
    assert not any(colocated.leaks.values()), colocated.leaks
    assert colocated.figures()["ttft_mean_s"] < split.figures()["ttft_mean_s"]
