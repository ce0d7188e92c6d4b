"""What becomes of choices and actions, where a scripted policy tells the conductor each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from support.sim_trace import BLOCK, small_cluster

from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.actions import Action, Prefetch, Replicate, SwitchRole
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.early import Early
from moonpool.scheduler.policy import Asked, Choice
from moonpool.sim.cluster import Link, SimCluster, Ssd
from moonpool.sim.costs import compute_s, prefill_s, step_s
from moonpool.sim.run import Simulation, simulate

SLOW = Link(bytes_per_s=2e9)
PROMPT = tuple(range(40))


@dataclass(frozen=True, slots=True)
class Told:
    """``until`` None: as much as the worker and its node hold."""

    prefill: str
    decode: str = "decode-d0"
    until: int | None = None
    source: str = ""
    front: int = 0
    move: bool = False
    then: tuple[Action, ...] = ()


@dataclass
class Scripted(Early):
    told: Sequence[Told] = field(default_factory=tuple)
    name = "scripted"

    def choose(self, asked: Asked) -> Choice:
        told = self._of(asked)
        prefill, decode = (asked.board.row[MemberId(name)] for name in (told.prefill, told.decode))
        until = asked.local_blocks(prefill) if told.until is None else told.until
        return Choice(prefill, decode, until, NodeId(told.source) if told.source else None, told.front, told.move)

    def follow_up(self, asked: Asked, choice: Choice) -> list[Action]:
        return list(self._of(asked).then)

    def _of(self, asked: Asked) -> Told:
        return self.told[int(asked.request.request.removeprefix("r"))]


def row(at_s: float, tokens: int, ids: tuple[int, ...], output: int = 1) -> TraceRow:
    return TraceRow(at_s * 1e3, tokens, output, ids)


def run(cluster: SimCluster, rows: list[TraceRow], *told: Told) -> Simulation:
    simulation = Simulation(rows, cluster, Conductor(policy=Scripted(told)))
    simulation.run()
    assert {what: n for what, n in simulation.outcome.leaks.items() if n} == {}
    return simulation


def test_a_fetch_is_hidden_behind_compute_but_for_the_last_layer() -> None:
    cluster = small_cluster(link=SLOW)
    rows = [row(0, 40 * BLOCK, PROMPT), row(60, 40 * BLOCK + 10, (*PROMPT, 99))]
    _, second = run(cluster, rows, Told("prefill-p0"), Told("prefill-p1", until=40, source="p0")).outcome.requests
    load = 40 * BLOCK * cluster.model.kv_bytes_per_token / SLOW.bytes_per_s
    work = prefill_s(cluster.prefill, 40 * BLOCK + 10, 40 * BLOCK)
    assert load > work and second.cached_tokens == 40 * BLOCK
    assert second.ttft_s == pytest.approx(load + work / cluster.model.layers)


def test_without_overlap_compute_begins_once_the_fetch_has_come() -> None:
    cluster = small_cluster(link=SLOW)
    cluster = cluster.changed(prefill=cluster.prefill.model_copy(update={"overlap": False}))
    rows = [row(0, 40 * BLOCK, PROMPT), row(60, 40 * BLOCK + 10, (*PROMPT, 99))]
    _, second = run(cluster, rows, Told("prefill-p0"), Told("prefill-p1", until=40, source="p0")).outcome.requests
    load = 40 * BLOCK * cluster.model.kv_bytes_per_token / SLOW.bytes_per_s
    assert second.ttft_s == pytest.approx(load + prefill_s(cluster.prefill, 40 * BLOCK + 10, 40 * BLOCK))


def test_the_front_is_computed_while_the_rest_comes_in() -> None:
    cluster = small_cluster(link=SLOW)
    rows = [row(0, 40 * BLOCK, PROMPT), row(60, 40 * BLOCK + 10, (*PROMPT, 99))]
    told = Told("prefill-p1", until=40, source="p0", front=12)
    simulation = run(cluster, rows, Told("prefill-p0"), told)
    second = simulation.outcome.requests[1]
    load = 28 * BLOCK * cluster.model.kv_bytes_per_token / SLOW.bytes_per_s
    front = compute_s(cluster.prefill, 0, 12 * BLOCK)
    work = cluster.prefill.a + compute_s(cluster.prefill, 40 * BLOCK, 40 * BLOCK + 10) + cluster.prefill.d * 28 * BLOCK
    assert second.cached_tokens == 28 * BLOCK
    assert second.ttft_s == pytest.approx(max(front, load) + work)
    assert simulation.site.stores[NodeId("p1")].pool.lookup(keys(PROMPT)) == 40, "computed and fetched blocks are kept together"


def keys(ids: Sequence[int]) -> list[bytes]:
    return [one.to_bytes(16, "little") for one in ids]


@pytest.mark.parametrize("move", [False, True], ids=["copied", "moved"])
def test_of_blocks_that_moved_the_old_copy_goes_first(move: bool) -> None:
    """The pool of p0 holds 60 blocks: 40, then 18 others; the next prompt needs 10."""
    cluster = small_cluster()
    prefill, decode = cluster.groups
    cluster = cluster.changed(groups=(prefill.model_copy(update={"pool_tokens": 60 * BLOCK}), decode))
    other, third = tuple(range(200, 218)), tuple(range(300, 310))
    rows = [
        row(0, 18 * BLOCK, other),
        row(20, 40 * BLOCK, PROMPT),
        row(40, 40 * BLOCK + 10, (*PROMPT, 99)),
        row(60, 10 * BLOCK, third),
    ]
    fetched = Told("prefill-p1", until=40, source="p0", move=move)
    simulation = run(cluster, rows, Told("prefill-p0"), Told("prefill-p0"), fetched, Told("prefill-p0"))
    pool = simulation.site.stores[NodeId("p0")].pool
    assert pool.lookup(keys(third)) == 10
    assert (pool.lookup(keys(other)), pool.lookup(keys(PROMPT))) == ((18, 32) if move else (10, 40))


def test_a_prompt_may_be_computed_by_its_decode_worker() -> None:
    cluster = small_cluster(keep="decode")
    rows = [row(0, 3 * BLOCK + 5, (0, 1, 2, 3), 20), row(30, 3 * BLOCK + 9, (0, 1, 2, 4), 20)]
    told = Told("decode-d0", "decode-d0")
    first, second = run(cluster, rows, told, told).outcome.requests
    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * BLOCK)
    assert first.ttft_s == pytest.approx(cluster.prefill.a + compute_s(cluster.prefill, 0, 3 * BLOCK + 5))
    assert first.prefill == first.decode == "decode-d0"


def test_a_prompt_cached_whole_has_its_first_token_from_one_step_of_its_decode_worker() -> None:
    cluster = small_cluster(keep="decode")
    rows = [row(at, 3 * BLOCK, (0, 1, 2), 9) for at in (0, 30)]
    told = Told("decode-d0", "decode-d0")
    _, second = run(cluster, rows, told, told).outcome.requests
    load = cluster.prefill.a + cluster.prefill.d * (3 * BLOCK - 1)
    assert second.cached_tokens == 3 * BLOCK - 1
    assert second.ttft_s == pytest.approx(load + step_s(cluster.decode, 1, 3 * BLOCK))


def test_a_hot_prefix_is_replicated_beside_everything_else() -> None:
    rows = [row(0, 40 * BLOCK, PROMPT), row(30, BLOCK, (500,)), row(60, 40 * BLOCK + 10, (*PROMPT, 99))]
    copy = Replicate(NodeId("p0"), NodeId("p1"), tuple(keys(PROMPT[:25])))
    told = (Told("prefill-p0"), Told("prefill-p0", then=(copy,)), Told("prefill-p1"))
    simulation = run(small_cluster(), rows, *told)
    assert simulation.outcome.counters["replications"] == 1
    assert simulation.outcome.requests[2].cached_tokens == 25 * BLOCK


def test_blocks_on_ssd_are_loaded_and_prefetched_ones_are_there_already() -> None:
    cluster = small_cluster(ssd=Ssd(read_bytes_per_s=2e9, write_bytes_per_s=5e9))
    prefill, decode = cluster.groups
    small = prefill.model_copy(update={"pool_tokens": 60 * BLOCK, "ssd_tokens": 200 * BLOCK})
    cluster = cluster.changed(groups=(small, decode))
    rows = [row(0, 40 * BLOCK, PROMPT), row(30, 40 * BLOCK, tuple(range(100, 140))), row(60, 40 * BLOCK + 10, (*PROMPT, 99))]
    told = [Told("prefill-p0"), Told("prefill-p0"), Told("prefill-p0", until=40)]
    loaded = run(cluster, rows, *told).outcome.requests[2]
    load = 20 * BLOCK * cluster.model.kv_bytes_per_token / 2e9
    work = prefill_s(cluster.prefill, 40 * BLOCK + 10, 40 * BLOCK)
    assert loaded.cached_tokens == 40 * BLOCK
    assert loaded.ttft_s == pytest.approx(load + work / cluster.model.layers)
    told[1] = Told("prefill-p0", then=(Prefetch(NodeId("p0"), tuple(keys(PROMPT))),))
    rows.insert(2, row(45, BLOCK, (700,)))
    told.insert(2, Told("prefill-p0", then=(Prefetch(NodeId("p0"), tuple(keys(PROMPT))),)))
    fetched = run(cluster, rows, *told).outcome.requests[3]
    assert fetched.ttft_s == pytest.approx(work)


def test_a_worker_that_switches_its_role_ends_what_it_has_first() -> None:
    cluster = small_cluster(switch_s=4.0, keep="decode")
    rows = [row(0, 20_000, tuple(range(40)), 200), row(1, BLOCK, (90,), 5), row(40, BLOCK, (91,), 5)]
    switch = SwitchRole(MemberId("decode-d0"), Role.PREFILL)
    told = (Told("prefill-p0"), Told("prefill-p1", "decode-d1", then=(switch,)), Told("decode-d0", "decode-d1"))
    simulation = run(cluster, rows, *told)
    first, _, third = simulation.outcome.requests
    assert first.attempts == 1 and first.ended is not None
    assert third.prefill == "decode-d0" and third.decode == "decode-d1" and third.attempts == 1
    assert simulation.machines.prefills.keys() == {"prefill-p0", "prefill-p1", "decode-d0"}
    assert simulation.outcome.counters["switches"] == 1


def test_a_policy_that_finds_nobody_has_the_request_asked_again_and_refused_in_the_end() -> None:
    class Nobody(Early):
        name = "nobody"

        def choose(self, asked: Asked) -> Choice | None:
            return None

    outcome = simulate([row(0, BLOCK, (1,))], small_cluster(), policy=Nobody())
    assert outcome.requests[0].refused == "no_path"
    assert outcome.figures()["refused"] == 1.0
