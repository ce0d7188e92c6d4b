"""What the driver makes of actors that end in ways that Ray does not mend, and of names that are taken; Ray itself is away."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnschedulableError, RayError, RaySystemError, RuntimeEnvSetupError

from moonpool.cluster.launch import ray_room
from moonpool.cluster.launch.ray_launcher import RayLauncher
from moonpool.cluster.launch.ray_room import Room
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import ClusterConfig, Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, NodeId, Role

NAME = "sentinel"
PLACEMENT = importlib.import_module("ray.util.placement_group")  # ray.util has a function of that name, too


class Told:
    """A method of an actor that answers with ``error``, or never."""

    def __init__(self, error: RayError | None) -> None:
        self._error = error

    def remote(self, *_: Any) -> Awaitable[Any]:
        return self._answer()

    async def _answer(self) -> Any:
        if self._error is None:
            await asyncio.get_running_loop().create_future()
        raise self._error  # type: ignore[misc]


@pytest.mark.parametrize(
    "error",
    [
        ActorUnschedulableError("no node of these labels is left"),
        ActorPlacementGroupRemoved(),
        RuntimeEnvSetupError("pip said no"),
        RayError("ConfigError: cluster.key_file: cannot make /x: Read-only file system"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_actor_that_ray_cannot_bring_back_is_given_up_with_its_reason(error: RayError, tmp_path: Path) -> None:
    failures: list[tuple[MemberId, str]] = []
    launcher = RayLauncher(Config(), StateDir.create(tmp_path), lambda line: None, lambda *why: failures.append(why))
    actor = SimpleNamespace(arrive=Told(error), run=Told(None), next_line=Told(None))
    launcher._create = lambda spec: actor  # type: ignore[method-assign]
    spec = RoleSpec(MemberId("prefill-0"), Role.PREFILL, NodeId("a"), Config(), "127.0.0.1:1", tmp_path)
    await launcher.start(spec)
    await asyncio.wait_for(launcher._keepers[spec.member], 10.0)
    ((member, why),) = failures
    assert member == "prefill-0"
    assert why == str(error).strip().splitlines()[-1]


def taken(monkeypatch: pytest.MonkeyPatch, *, actors: list[dict[str, str]], groups: dict[str, dict[str, str]]) -> None:
    monkeypatch.setattr("ray.util.list_named_actors", lambda all_namespaces: actors)
    monkeypatch.setattr(PLACEMENT, "placement_group_table", lambda: groups)


def test_a_cluster_that_still_waits_for_room_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"name": f"{NAME}/nodes", "state": "PENDING"}
    taken(monkeypatch, actors=[{"name": "other/store-a", "namespace": "other"}], groups={"1": waits})
    assert ray_room.names_of(NAME) == [f"{NAME}/nodes"]
    taken(monkeypatch, actors=[], groups={"1": {**waits, "state": "REMOVED"}, "2": {**waits, "name": "other/nodes"}})
    assert ray_room.names_of(NAME) == []


@pytest.mark.parametrize("there", [True, False])
async def test_of_two_that_start_at_once_the_second_hears_that_the_name_is_taken(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"1": {"name": f"{NAME}/nodes", "state": "CREATED"}} if there else {}
    taken(monkeypatch, actors=[], groups=groups)
    monkeypatch.setattr("moonpool.cluster.launch.ray_room.shortage", lambda config, nodes: "")
    monkeypatch.setattr("moonpool.cluster.launch.ray_room._nodes", list)

    def refuse(*_: Any, **__: Any) -> Callable[[], None]:
        raise RaySystemError("Failed to create placement group")

    monkeypatch.setattr(PLACEMENT, "placement_group", refuse)
    config = Config(cluster=ClusterConfig(name=NAME))
    with pytest.raises(ConfigError if there else RaySystemError, match="runs in this Ray already" if there else "placement"):
        await Room.find(config, lambda line: None, may_grow=True)
