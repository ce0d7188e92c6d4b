"""How workers of one host share its cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moonpool.cluster.control_group import Group
from moonpool.cluster.sharing import advice, computing, cores, decided, own_threads, torch_threads, turns
from moonpool.core.config import ClusterConfig, Config, EngineConfig, NodeConfig
from moonpool.core.ids import Role

SPLIT = (NodeConfig(name="a", prefill=1), NodeConfig(name="b", decode=1, conductor=1, gateway=1))
BOTH = (NodeConfig(name="a", both=1, conductor=1, gateway=1),)


def config(nodes: tuple[NodeConfig, ...], **engine: object) -> Config:
    return Config(engine=EngineConfig.model_validate(engine), cluster=ClusterConfig(nodes=nodes))


@pytest.mark.parametrize(
    ("nodes", "engine", "backend", "permit"),
    [
        (SPLIT, {}, "compiled", "on"),
        (SPLIT, {}, "fused", "off"),
        (SPLIT, {"threads": 1}, "compiled", "off"),
        (SPLIT, {"permit": "off"}, "compiled", "off"),
        (SPLIT, {"permit": "on", "threads": 2}, "torch", "on"),
        (BOTH, {}, "compiled", "off"),
    ],
)
def test_several_workers_take_turns_where_their_threads_sleep_between_steps(
    nodes: tuple[NodeConfig, ...], engine: dict[str, object], backend: str, permit: str
) -> None:
    assert decided(config(nodes, **engine), backend).engine.permit == permit


def test_who_takes_turns_with_the_same_cores_says_the_same(tmp_path: Path) -> None:
    def of(folder: str, permit: str) -> str:
        settings = config(SPLIT, permit=permit)
        where = settings.cluster.model_copy(update={"state_dir": str(tmp_path / folder)})
        return turns(settings.model_copy(update={"cluster": where}))

    assert of("one", "off") == ""
    assert of("one", "on") == of("one", "on") != ""
    assert of("other", "on") != of("one", "on"), "cores of its own, in a container of the same kernel"
    (tmp_path / "file").touch()
    assert of("file", "on") == ""


def test_whoever_splits_few_cores_hears_of_role_both() -> None:
    assert advice(config(SPLIT), 2) == "2 workers share 2 cores; on one machine `moonpool up --role both` answers sooner"
    assert advice(config(SPLIT), 8) is None
    assert advice(config(SPLIT, threads=1), 2) is None
    assert advice(config(BOTH), 2) is None


def test_threads_of_each_kind() -> None:
    split = config(SPLIT)
    assert [torch_threads(split, role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)] == [1, 1, cores()]
    assert [own_threads(split, role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)] == [cores()] * 3
    assert own_threads(config(SPLIT, permit="off"), Role.PREFILL) == 1
    assert torch_threads(config(SPLIT, permit="on"), Role.PREFILL) == cores()
    assert [own_threads(config(SPLIT, threads=3), Role.PREFILL), torch_threads(config(BOTH, threads=3), Role.BOTH)] == [3, 3]
    assert computing(split) == 2


def test_ranks_of_one_worker_share_its_cores() -> None:
    assert torch_threads(config(BOTH, tensor_parallel=2), Role.BOTH) == max(1, cores() // 2)
    assert torch_threads(config(BOTH, tensor_parallel=1 << 5), Role.BOTH) >= 1
    assert torch_threads(config(BOTH, tensor_parallel=2, threads=3), Role.BOTH) == 3


@pytest.mark.parametrize(("quota", "threads"), [(1.5, 1), (0.25, 1), (1e6, None), (None, None)])
def test_a_containers_quota_bounds_the_threads(quota: float | None, threads: int | None) -> None:
    assert cores(Group(cores=quota)) == (threads or len(os.sched_getaffinity(0)))
