"""Tenants at one conductor: whose prompt is bound next, who leaves a full queue, and what a probing tenant can learn."""

from __future__ import annotations

import pytest
from support.cluster_of_members import BLOCK, Cluster, keys, prefill_seconds

from moonpool.core.events import Tier
from moonpool.core.ids import Role
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.actions import Bound
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy

PROMPT = 500
WORK_S = prefill_seconds(PROMPT)


def one_worker(max_waiting: int = 1_000) -> Cluster:
    conductor = Conductor(policy=make_policy("moonpool", {}), admission=make_admission("none", {}), max_waiting=max_waiting)
    cluster = Cluster(conductor)
    cluster.join("store-a", Role.STORE, "a")
    cluster.join("prefill-0", Role.PREFILL, "a")
    cluster.join("decode-0", Role.DECODE, "a")
    cluster.teach("prefill-0", "decode-0")
    return cluster


def ask(
    cluster: Cluster, name: str, tenant: str, *, tokens: int = PROMPT, weight: float = 1.0, priority: int = 0
) -> Placement | Refusal | Later:
    request = PlaceRequest(name, 1, (), tokens, 32, Targets(), tenant, priority=priority, weight=weight)
    return cluster.conductor.place(request, cluster.now)


def served(cluster: Cluster, rounds: int, first: str) -> list[str]:
    """Names in the order they are bound, each once the one before it, from ``first`` on, is over."""
    out, running = [], first
    for _ in range(rounds):
        cluster.now += WORK_S
        done = Finished(running, 1, 0, 1.0, 0.0, 1, 0)
        actions = [*cluster.conductor.finished(done, cluster.now), *cluster.conductor.due(cluster.now)]
        (bound,) = [one for one in actions if isinstance(one, Bound)]
        assert isinstance(bound.answer, Placement)
        running = bound.request
        out.append(running)
    return out


def test_a_flood_leaves_every_other_turn_to_a_tenant_that_came_late() -> None:
    cluster = one_worker()
    for i in range(40):
        ask(cluster, f"flood-{i}", "flood", priority=5)
    for i in range(3):
        assert isinstance(ask(cluster, f"quiet-{i}", "quiet", tokens=PROMPT + 50), Later)
    first = served(cluster, 6, "flood-0")
    assert sum(name.startswith("quiet") for name in first) == 3


def test_turns_go_by_weight() -> None:
    cluster = one_worker()
    for i in range(30):
        ask(cluster, f"light-{i}", "light")
        ask(cluster, f"heavy-{i}", "heavy", weight=3.0)
    names = [name.split("-")[0] for name in served(cluster, 24, "light-0")]
    assert names.count("heavy") == pytest.approx(18, abs=2)


def test_the_wait_that_a_tenant_is_told_is_its_own() -> None:
    cluster = one_worker()
    for i in range(40):
        flood = ask(cluster, f"flood-{i}", "flood")
    quiet = ask(cluster, "quiet", "quiet")
    assert isinstance(flood, Later)
    assert isinstance(quiet, Later)
    assert quiet.predicted_ttft_ms < 4 * WORK_S * 1e3
    assert flood.predicted_ttft_ms > 30 * WORK_S * 1e3


def test_a_full_queue_refuses_the_flood_and_not_the_other_tenant() -> None:
    cluster = one_worker(max_waiting=8)
    answers = [ask(cluster, f"flood-{i}", "flood") for i in range(12)]
    assert [type(answer) for answer in answers[-3:]] == [Refusal] * 3
    cluster.conductor.take_actions()
    assert isinstance(ask(cluster, "quiet", "quiet"), Later)
    (gone,) = [one for one in cluster.conductor.take_actions() if isinstance(one, Bound)]
    assert gone.request.startswith("flood")
    assert isinstance(gone.answer, Refusal)
    told = cluster.conductor.explain(gone.request)
    assert told is not None
    assert "overloaded" in str(told["decisions"][0])
    assert cluster.gauge("waiting") == 8


@pytest.mark.parametrize(("held", "used"), [(3, 0), (4, 4), (7, 4), (8, 8)])
@pytest.mark.parametrize("tier", [Tier.G1, Tier.G2])
def test_hits_below_a_quantum_are_neither_used_nor_promised(held: int, used: int, tier: Tier) -> None:
    cluster = Cluster(Conductor(min_hit_tokens=4 * BLOCK - 5))
    cluster.join("store-a", Role.STORE, "a")
    cluster.join("prefill-0", Role.PREFILL, "a")
    cluster.join("decode-0", Role.DECODE, "a")
    cluster.teach("prefill-0", "decode-0")
    prompt = keys(1, 12)
    if tier is Tier.G1:
        cluster.stored("prefill-0", prompt[:held], tier=tier)
    else:
        cluster.stored("a", prompt[:held], store="store-a")
    cluster.placed("r", 12 * BLOCK, prompt=prompt)
    told = cluster.conductor.explain("r")
    assert told is not None
    assert told["decisions"][0]["predicted"]["cached_tokens"] == used * BLOCK
