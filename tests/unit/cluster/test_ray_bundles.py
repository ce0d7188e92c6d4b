from __future__ import annotations

from typing import Any

import pytest

from moonpool.cluster.launch.ray_bundles import CPUS, RayNode, bundle, bundles, selectors, short_of_cpus, shortage
from moonpool.core.config import ClusterConfig, Config, NodeConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role

PREFILL = NodeConfig(name="a", prefill=1, labels={"room": "prefill"})
DECODE = NodeConfig(name="b", decode=1, conductor=1, gateway=1)


def config(*nodes: NodeConfig, **cluster: Any) -> Config:
    return Config(cluster=ClusterConfig(nodes=nodes or (PREFILL, DECODE), **cluster))


def ray_node(cpus: float, gpus: float = 0.0, room: str = "prefill", **more: float) -> RayNode:
    return RayNode("10.0.0.1", {"CPU": cpus, "GPU": gpus, **more}, {"room": room})


def test_the_default_nodes_fit_on_two_cores() -> None:
    assert sum(one["CPU"] for one in bundles(Config())) <= 2


def test_a_node_claims_what_its_roles_claim_and_its_own_resources() -> None:
    node = NodeConfig(name="a", prefill=2, decode=1, both=1, conductor=1, gateway=1, resources={"nic": 1})
    roles = [Role.STORE, Role.PREFILL, Role.PREFILL, Role.DECODE, Role.BOTH, Role.CONDUCTOR, Role.GATEWAY]
    assert bundle(config(node), node) == {"CPU": pytest.approx(sum(CPUS[role] for role in roles)), "nic": 1}
    chosen = config(node, ray_cpus={"prefill": 4, "gateway": 0}, ray_gpus_per_worker=0.5)
    assert bundle(chosen, node) == {"CPU": pytest.approx(0.1 + 2 * 4 + 0.4 + 1 + 0.1), "GPU": 2.0, "nic": 1}
    assert selectors(config()) == [{"room": "prefill"}, {}]


def test_ranks_of_a_worker_each_claim_what_a_worker_of_one_does() -> None:
    node = NodeConfig(name="a", prefill=2, conductor=1, tensor_parallel=4)
    chosen = config(node, NodeConfig(name="b", decode=1), ray_cpus={"prefill": 3}, ray_gpus_per_worker=1)
    assert bundles(chosen) == [
        {"CPU": pytest.approx(0.1 + 2 * 4 * 3 + 0.1), "GPU": 8.0},
        {"CPU": pytest.approx(0.5), "GPU": 1.0},
    ]


@pytest.mark.parametrize(("name", "setting"), [("CPU", "cluster.ray_cpus"), ("GPU", "cluster.ray_gpus_per_worker")])
def test_resources_that_have_a_setting_of_their_own_are_refused(name: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        bundles(config(NodeConfig(name="a", both=1, resources={name: 1})))


@pytest.mark.parametrize(
    ("nodes", "more", "missing"),
    [
        ([ray_node(0.5), ray_node(0.7)], {}, ""),
        ([ray_node(1.2)], {}, ""),
        ([ray_node(0.5), ray_node(0.6)], {}, "node 'b' needs 0.7 CPU, no Ray node has more than 0.6"),
        ([ray_node(1.1)], {}, "these processes need 1.2 CPU, Ray has 1.1"),
        (
            [ray_node(2, room="decode")],
            {},
            "node 'a' wants labels room=prefill, and no Ray node has them (there are room=decode)",
        ),
        ([], {}, "Ray has no live node"),
        ([ray_node(2, 2)], {"ray_gpus_per_worker": 1}, ""),
        ([ray_node(2, 1)], {"ray_gpus_per_worker": 1}, "these processes need 2 GPU, Ray has 1"),
        ([ray_node(2)], {"ray_gpus_per_worker": 1}, "node 'a' needs 1 GPU, no Ray node like that has more than 0"),
        ([ray_node(2)], {"ray_strategy": "STRICT_SPREAD"}, "STRICT_SPREAD needs 2 Ray nodes, there are 1"),
        (
            [ray_node(1), ray_node(1)],
            {"ray_strategy": "STRICT_PACK"},
            "STRICT_PACK needs 1.2 CPU on one Ray node, none has more than 1",
        ),
    ],
)
def test_what_ray_lacks_is_named(nodes: list[RayNode], more: dict[str, Any], missing: str) -> None:
    found = shortage(config(**more), nodes)
    assert (found == "") == (missing == "") and missing in found


def test_what_others_use_is_missing_too() -> None:
    assert shortage(config(), [ray_node(2)], {"CPU": 1.2}) == ""
    assert shortage(config(), [ray_node(2)], {"CPU": 1.1}) == "these processes need 1.2 CPU, 1.1 of Ray's 2 are free"


def test_selectors_with_operators_are_left_to_ray() -> None:
    for wanted in ("!gateway", "in(prefill,decode)", "!in(gateway)"):
        assert shortage(config(NodeConfig(name="a", both=1, labels={"room": wanted})), [ray_node(2)]) == ""


def test_a_ray_of_its_own_is_not_started_for_nothing() -> None:
    assert short_of_cpus(config(), 1.2) == ""
    assert short_of_cpus(config(), 1.1) == "these processes need 1.2 CPU, Ray has 1.1"
