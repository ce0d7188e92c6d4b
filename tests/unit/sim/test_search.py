"""The cheapest split: against trying every split, on a small trace."""

from __future__ import annotations

import pytest

from moonpool.core.errors import ConfigError
from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import SimCluster
from moonpool.sim.run import simulate
from moonpool.sim.search import Goal, Makers, Search, Tried

CLUSTER = SimCluster.model_validate(
    {
        "groups": (
            {"role": "prefill", "count": 1, "pool_tokens": 200_000, "device_tokens": 100_000},
            {"role": "decode", "count": 1, "pool_tokens": 512, "device_tokens": 100_000},
        ),
        "model": {"name": "m", "layers": 4, "kv_bytes_per_token": 64},
        "prefill": {"a": 0.05, "b": 2e-4, "c": 0.0},
        "decode": {"base_s": 0.02, "per_sequence_s": 2e-3, "per_token_s": 1e-6},
        "link": {"bytes_per_s": 1e9},
        "targets": {"ttft_s": 1.5, "tbt_s": 0.05},
    }
)
MAKERS = Makers(lambda: make_policy("local_min_ttft"), lambda: make_admission("none"))


def trace(requests: int = 60, gap_ms: float = 200.0) -> list[TraceRow]:
    return [
        TraceRow(i * gap_ms, 2_000 + 512 * (i % 5), 40 + 7 * (i % 9), tuple(range(100 * i, 100 * i + 4 + i % 5)))
        for i in range(requests)
    ]


def share(prefill: int, decode: int) -> float:
    cluster = CLUSTER.resized(prefill=prefill, decode=decode)
    outcome = simulate(trace(), cluster, policy=MAKERS.policy(), admission=MAKERS.admission())
    return outcome.figures()["met_share"]


@pytest.mark.parametrize("decode_price", [1.0, 3.0])
def test_the_cheapest_split_is_that_of_trying_all(decode_price: float) -> None:
    goal = Goal(share=0.95, most=4, decode_price=decode_price)
    tried: list[Tried] = []
    found = Search(trace(), CLUSTER, MAKERS, goal, tried.append).cheapest()
    every = {(p, d): share(p, d) for p in range(1, 5) for d in range(1, 5)}
    enough = {split: goal.cost(*split) for split, met in every.items() if met >= goal.share}
    assert found.cost == min(enough.values())
    assert every[found.prefill, found.decode] == pytest.approx(found.share)
    assert found.tried == tried
    assert len(tried) < 16, "some splits need no run"
    for one in tried:
        assert one.suffices == ((one.prefill, one.decode) in enough), one


def test_runs_that_cannot_suffice_end_early() -> None:
    tried: list[Tried] = []
    Search(trace(), CLUSTER, MAKERS, Goal(share=0.95, most=4), tried.append).cheapest()
    assert any(one.pruned for one in tried)
    assert not any(one.pruned and one.suffices for one in tried)


def test_the_best_split_of_so_many_nodes_beats_its_neighbours() -> None:
    found = Search(trace(), CLUSTER, MAKERS, Goal(share=0.95)).best_split(4)
    assert found.prefill + found.decode == 4
    assert found.share == max(share(prefill, 4 - prefill) for prefill in (1, 2, 3))


def test_what_cannot_be_reached_is_said() -> None:
    with pytest.raises(ConfigError, match="1 prefill and 1 decode nodes do not keep 95%"):
        Search(trace(), CLUSTER, MAKERS, Goal(share=0.95, most=1)).cheapest()


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match="share: 0"):
        Search(trace(), CLUSTER, MAKERS, Goal(share=0.0))
    with pytest.raises(ConfigError, match="no requests"):
        Search([], CLUSTER, MAKERS, Goal())
    with pytest.raises(ConfigError, match="at least one of either kind"):
        Search(trace(), CLUSTER, MAKERS, Goal()).best_split(1)
