from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.launch.host import Host, Site, require_fitting_hosts, shared_pools
from moonpool.cluster.launch.plan import plan
from moonpool.cluster.leaving import END_S, end_s
from moonpool.cluster.spec import RoleSpec, with_absolute_paths
from moonpool.core.config import (
    ClusterConfig,
    Config,
    EngineConfig,
    GatewayConfig,
    NodeConfig,
    StoreConfig,
    TimingConfig,
    TransferConfig,
)
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId, Role

GIB = 1 << 30


def names(config: Config) -> list[list[str]]:
    return [[f"{s.member}@{s.node}" for s in stage] for stage in plan(config, registry="r:1", model_dir=Path("m"))]


def test_the_default_cluster_is_two_nodes_with_their_stores_first() -> None:
    assert names(Config()) == [
        ["store-a@a", "store-b@b"],
        ["prefill-0@a", "prefill-1@a", "decode-0@b", "conductor-0@b", "gateway-0@b"],
    ]


def test_workers_of_a_node_have_as_many_ranks_as_it_says() -> None:
    nodes = (
        NodeConfig(name="a", prefill=1, tensor_parallel=4),
        NodeConfig(name="b", decode=1),
        NodeConfig(name="c", decode=1, tensor_parallel=1),
    )
    config = Config(cluster=ClusterConfig(nodes=nodes), engine=EngineConfig(tensor_parallel=2))
    specs = [s for stage in plan(config, registry="r:1", model_dir=Path("m")) for s in stage]
    assert {s.member: s.config.engine.tensor_parallel for s in specs if s.role in (Role.PREFILL, Role.DECODE)} == {
        "prefill-0": 4,
        "decode-0": 2,
        "decode-1": 1,
    }


def test_gateways_take_ports_upwards_unless_the_system_chooses() -> None:
    nodes = (NodeConfig(name="a", both=1, conductor=1, gateway=2), NodeConfig(name="b", gateway=1))
    for port, wanted in ((8000, [8000, 8001, 8002]), (0, [0, 0, 0])):
        config = Config(cluster=ClusterConfig(nodes=nodes), gateway=GatewayConfig(port=port))
        specs = [s for stage in plan(config, registry="r:1", model_dir=Path("m")) for s in stage]
        assert [s.config.gateway.port for s in specs if s.role is Role.GATEWAY] == wanted


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (Config(cluster=ClusterConfig(probe_port=65_530)), r"cluster\.probe_port: 65530 .* 7 .* at most 65529"),
        (
            Config(
                cluster=ClusterConfig(nodes=(NodeConfig(name="a", both=1, conductor=1, gateway=2),)),
                gateway=GatewayConfig(port=65_535),
            ),
            r"gateway\.port: 65535 .* at most 65534",
        ),
    ],
)
def test_ports_beyond_the_last_one_are_refused_before_anything_starts(config: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        names(config)
    assert names(Config(cluster=ClusterConfig(probe_port=65_529)))


def test_chosen_ports_are_the_first_of_those_that_processes_and_store_nodes_take() -> None:
    config = Config(cluster=ClusterConfig(port=9000, probe_port=9100), transfer=TransferConfig(port=9200))
    specs = [s for stage in plan(config, registry="r:1", model_dir=Path("m")) for s in stage]
    assert [s.config.cluster.port for s in specs] == [9000 + i for i in range(len(specs))]
    assert [s.config.cluster.probe_port for s in specs] == [9100 + i for i in range(len(specs))]
    assert [s.config.transfer.port for s in specs if s.role is Role.STORE] == [9200, 9201]
    open_ones = [s for stage in plan(Config(), registry="r:1", model_dir=Path("m")) for s in stage]
    assert all(s.config.cluster.port == s.config.transfer.port == 0 for s in open_ones)


@pytest.mark.parametrize("role", list(Role))
def test_whoever_ends_a_process_waits_longer_than_it_takes_to_leave(role: Role) -> None:
    config = Config(
        timing=TimingConfig(drain_ms=1_000), store=StoreConfig(drain_ms=20_000), gateway=GatewayConfig(drain_ms=300)
    )
    leaves_s = {Role.STORE: 1.0 + 2 * 20.0, Role.GATEWAY: 0.3}.get(role, 1.0)  # docs/operations.md, Leaving and restarting
    assert end_s(config, role) == leaves_s + END_S


@given(st.lists(st.builds(lambda p, d, b: (p, d, b), *[st.integers(0, 3)] * 3), min_size=1, max_size=4))
def test_every_process_has_its_own_id_and_survives_json(counts: list[tuple[int, int, int]]) -> None:
    nodes = tuple(NodeConfig(name=f"n{i}", prefill=p, decode=d, both=b) for i, (p, d, b) in enumerate(counts))
    specs = [
        s for stage in plan(Config(cluster=ClusterConfig(nodes=nodes)), registry="r:1", model_dir=Path("m")) for s in stage
    ]
    assert len({s.member for s in specs}) == len(specs) == len(nodes) + sum(map(sum, counts))
    assert [RoleSpec.from_json(s.to_json()) for s in specs] == specs


def test_nodes_of_one_machine_share_half_of_its_memory_for_their_pools() -> None:
    roomy = Host("10.0.0.1", "one", memory=16 * GIB, space=100 * GIB)
    a, b, c = NodeId("a"), NodeId("b"), NodeId("c")
    assert shared_pools(Config(), {a: roomy, b: roomy}) == {a: 4 * GIB, b: 4 * GIB}
    assert shared_pools(Config(), {a: replace(roomy, space=GIB), b: replace(roomy, space=GIB)})[a] < GIB // 2
    assert shared_pools(Config(store=StoreConfig(pool_bytes=GIB)), {a: roomy, b: roomy}) == {}
    assert shared_pools(Config(), {a: roomy}) == {}
    other = replace(roomy, machine="two", memory=8 * GIB)
    assert shared_pools(Config(), {a: roomy, b: other, c: other}) == {b: 2 * GIB, c: 2 * GIB}, "by machine"
    stages = plan(Config(), registry="r:1", model_dir=Path("m"), pools={a: GIB})
    assert {s.node: s.config.store.pool_bytes for stage in stages for s in stage} == {"a": GIB, "b": 0}


@pytest.mark.parametrize(
    ("cluster", "gateway", "machines", "named"),
    [
        ({}, {}, ["one", "one"], ""),
        ({}, {}, ["one", "two"], "cluster.host: 127.0.0.1 cannot be the address of processes on 2 machines"),
        ({"host": "auto"}, {}, ["one", "one"], ""),
        (
            {"host": "auto"},
            {},
            ["one", "two"],
            "gateway.host: 127.0.0.1 is reached on the gateway's own machine only, and node b",
        ),
        ({"host": "auto"}, {"host": "auto"}, ["one", "two"], ""),
        ({"host": "auto"}, {"host": "auto"}, ["two", "two"], ""),
    ],
)
def test_addresses_that_mean_another_host_elsewhere_are_refused_with_the_fix(
    cluster: dict[str, str], gateway: dict[str, str], machines: list[str], named: str
) -> None:
    config = Config(cluster=ClusterConfig(**cluster), gateway=GatewayConfig(**gateway))  # type: ignore[arg-type]
    hosts = [Host(f"10.0.0.{i}", machine, GIB, GIB) for i, machine in enumerate(machines)]
    site = Site(Host("10.0.0.9", "one", GIB, GIB), {NodeId("a"): hosts[0], NodeId("b"): hosts[1]})
    if named:
        with pytest.raises(ConfigError, match=re.escape(named)):
            require_fitting_hosts(config, site)
    else:
        require_fitting_hosts(config, site)


def test_rdma_is_refused_between_node_ids_that_ray_put_on_one_machine() -> None:
    config = Config(cluster=ClusterConfig(host="auto", ray_address="auto"), transfer=TransferConfig(ucx_tls="rc"))
    one, two = Host("10.0.0.1", "one", GIB, GIB), Host("10.0.0.2", "two", GIB, GIB)
    with pytest.raises(ConfigError, match="ucx_tls: 'rc' is refused between node ids on one machine"):
        require_fitting_hosts(config, Site(one, {NodeId("a"): one, NodeId("b"): one}))
    nodes = config.model_copy(update={"gateway": GatewayConfig(host="auto")})
    require_fitting_hosts(nodes, Site(one, {NodeId("a"): one, NodeId("b"): two}))


def test_split_workers_compute_with_one_thread_and_ucx_stays_on_loopback() -> None:
    config = with_absolute_paths(Config(), Path("/somewhere"))
    specs = {s.member: s for stage in plan(config, registry="r:1", model_dir=Path("m")) for s in stage}
    environment = specs["prefill-0"].environment()  # type: ignore[index]
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["UCX_NET_DEVICES"] == "lo"
    assert environment["UCX_TLS"] == "tcp"
    assert specs["store-a"].state_dir == Path("/somewhere/.cache/moonpool/clusters/moonpool")  # type: ignore[index]
