"""What the driver makes of actors that end in ways that Ray does not mend, and of names that are taken; Ray itself is away."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    RayActorError,
    RayError,
    RaySystemError,
    RuntimeEnvSetupError,
)

from moonpool.cluster.launch import ray_launcher, ray_room
from moonpool.cluster.launch.ray_launcher import RayLauncher
from moonpool.cluster.launch.ray_room import Room
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.process import EXIT_BAD_START, EXIT_STOPPED
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


class Life:
    """An actor's process: what it says, and how its role ends (exit code, why). It dies instead where ``ends`` is None."""

    def __init__(self, says: list[str], ends: tuple[int, str] | None) -> None:
        self._says, self._ends = says, ends
        self.died: Callable[[], None] = lambda: None
        self.arrive, self.run, self.next_line = (SimpleNamespace(remote=f) for f in (self._arrive, self._run, self._line))

    async def _arrive(self, hash_key: bytes) -> tuple[int, str]:
        return 0, "another machine"

    async def _run(self) -> tuple[int, str]:
        while self._says:  # noqa: ASYNC110  until they are heard
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self._ends is None:
            self.died()
            raise RayActorError
        return self._ends

    async def _line(self) -> str:
        if not self._says:
            await asyncio.get_running_loop().create_future()
        return self._says.pop(0)


NO_ROOM = (EXIT_BAD_START, "store-a: store.pool_bytes: 2 wanted, but 1 is free; use less")


@pytest.mark.parametrize(
    ("lives", "restarts", "failure"),
    [
        ([Life(["ready at x"], None), Life([], NO_ROOM), Life([], NO_ROOM), Life(["ready at y"], (EXIT_STOPPED, ""))], 2, ""),
        ([Life(["ready at x"], None), *(Life([], NO_ROOM) for _ in range(4))], 3, NO_ROOM[1]),
        ([Life(["pool: taken"], NO_ROOM)], 0, NO_ROOM[1]),
    ],
    ids=["worked-once", "too-often", "never-worked"],
)
async def test_what_worked_once_and_then_lacks_something_for_a_while_is_tried_again(
    lives: list[Life], restarts: int, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_launcher, "BAD_START_S", (0.01, 0.02))
    monkeypatch.setattr(ray_launcher, "RETRY_S", 0.01)
    said: list[str] = []
    failures: list[tuple[MemberId, str]] = []
    config = Config(cluster=ClusterConfig(max_restarts=3))
    launcher = RayLauncher(config, StateDir.create(tmp_path), said.append, lambda *why: failures.append(why))
    spec = RoleSpec(MemberId("store-a"), Role.STORE, NodeId("a"), config, "127.0.0.1:1", tmp_path)
    left = iter(lives)

    def create(spec: RoleSpec) -> Any:
        return next(left)

    async def anew(spec: RoleSpec, actor: Any) -> Any:
        return next(left)

    def died() -> None:  # Ray starts another process for it
        launcher._actors[spec.member] = next(left)

    lives[0].died = died
    launcher._create, launcher._anew = create, anew  # type: ignore[method-assign]
    await launcher.start(spec)
    await asyncio.wait_for(launcher._keepers[spec.member], 10.0)
    assert sum("cannot start (store.pool_bytes: 2 wanted" in line for line in said) == restarts
    assert [why for _, why in failures] == ([failure] if failure else [])


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
