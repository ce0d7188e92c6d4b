from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from moonpool.cluster.launch.death_watch import DeathWatch
from moonpool.cluster.launch.process_launcher import ProcessLauncher
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.membership import Membership
from moonpool.cluster.process import READY
from moonpool.cluster.registry import Registry
from moonpool.cluster.spec import RoleSpec, with_absolute_paths
from moonpool.core.config import ClusterConfig, Config, ModelConfig, TimingConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member
from moonpool.wire import pb

pytestmark = pytest.mark.processes

NAME = MemberId("conductor-0")


class House:
    """A registry, a launcher of dummy processes, and what both said."""

    def __init__(self, tmp_path: Path, config: Config) -> None:
        self.config = with_absolute_paths(
            config.model_copy(update={"cluster": ClusterConfig(state_dir=str(tmp_path / "state"))}), tmp_path
        )
        self.state = StateDir.create(Path(self.config.cluster.state_dir))
        self.registry = Registry(self.config.timing)
        self.said: list[str] = []
        self.failures: asyncio.Queue[str] = asyncio.Queue()
        self.lives: list[tuple[int, str, str]] = []
        command = [sys.executable, str(Path(__file__).with_name("dummy_role.py"))]
        self.launcher = ProcessLauncher(
            self.state,
            self.said.append,
            lambda member, why: self.failures.put_nowait(why),
            max_restarts=2,
            command=lambda spec: [*command, str(spec)],
        )

    async def start(self) -> None:
        address = await self.registry.start("127.0.0.1")
        self.peers = Membership(address, self.config.timing, lambda why, replaced: None)
        self.peers.subscribe(lambda c: self.lives.append((c.member.pid, c.liveness.value, c.proof)))
        self.deaths = DeathWatch(self.peers, [NodeId("a")])
        await self.launcher.open()
        await self.launcher.start(RoleSpec(NAME, Role.CONDUCTOR, NodeId("a"), self.config, address, Path("none")))

    async def live_one(self, *, other_than: int = 0) -> Member:
        def there() -> Member | None:
            change = self.peers.get(NAME)
            live = change is not None and change.liveness is Liveness.LIVE and change.member.pid != other_than
            return change.member if live and change else None

        await self.peers.until(lambda: there() is not None, 30.0, "life")
        found = there()
        assert found is not None
        return found

    async def stop(self) -> None:
        await self.launcher.stop()
        self.deaths.close()
        await self.peers.leave()
        await self.registry.close()


@asynccontextmanager
async def house(tmp_path: Path, config: Config = Config(timing=TimingConfig(heartbeat_ms=50))) -> AsyncIterator[House]:
    made = House(tmp_path, config)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def test_a_killed_process_is_proved_gone_and_comes_back_as_a_newer_life(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        first = await h.live_one()
        os.kill(first.pid, signal.SIGKILL)
        second = await h.live_one(other_than=first.pid)
        assert second.incarnation > first.incarnation
        assert second.id == first.id
        gone = [proof for pid, liveness, proof in h.lives if pid == first.pid and liveness == "gone"]
        assert gone == ["its process ended (pidfd)"]
        assert any("SIGKILL; restart 1" in line for line in h.said)
    assert not h.state.recorded()


async def test_one_asked_to_restart_leaves_in_order_and_comes_back_however_often(tmp_path: Path) -> None:
    """More often than a process that dies is started again."""
    async with house(tmp_path) as h:
        former = await h.live_one()
        for _ in range(3):
            async with grpc.aio.insecure_channel(former.address) as channel:
                await pb.admin_rpc.AdminStub(channel).Restart(pb.types.Empty())
            later = await h.live_one(other_than=former.pid)
            assert later.incarnation > former.incarnation
            assert (former.pid, "gone", "left") in h.lives
            former = later
        assert h.failures.empty()
        assert not any("exit code" in line for line in h.said)


async def test_admin_and_health_answer_and_stop_ends_it_for_good(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        member = await h.live_one()
        async with grpc.aio.insecure_channel(member.address) as channel:
            admin = pb.admin_rpc.AdminStub(channel)
            stats = await admin.Stats(pb.types.Empty())
            assert stats.member.id == NAME
            assert stats.numbers["answer"] == 42.0
            assert stats.numbers["process_threads"] >= 1
            assert stats.words["kind"] == "dummy"
            await admin.Stop(pb.types.Empty())
        await h.peers.until(lambda: (member.pid, "gone", "left") in h.lives, 10.0, "leave")
    assert not h.state.recorded()
    assert h.failures.empty()
    assert not any("restart" in line for line in h.said)


async def test_a_process_that_cannot_start_is_given_up_with_its_own_line(tmp_path: Path) -> None:
    async with house(tmp_path, Config(model=ModelConfig(name="broken"))) as h:
        why = await asyncio.wait_for(h.failures.get(), 30.0)
        assert why == "conductor-0: model.name: 'broken' cannot be loaded; use another"
        assert not any("cannot be loaded" in line for line in h.said)


async def test_one_that_worked_once_and_then_lacks_something_for_a_while_is_tried_again(tmp_path: Path) -> None:
    async with house(tmp_path, Config(model=ModelConfig(name="starved"))) as h:
        first = await h.live_one()
        while not any(READY in line for line in h.said):  # noqa: ASYNC110  a moment after it is live
            await asyncio.sleep(0.01)
        os.kill(first.pid, signal.SIGKILL)
        second = await h.live_one(other_than=first.pid)
        assert second.incarnation > first.incarnation
        assert any(
            "cannot start (store.pool_bytes: 2 bytes wanted, but 1 is free; use less); restart 2" in line for line in h.said
        )
        assert h.failures.empty()


async def test_a_process_that_writes_a_line_without_an_end_is_kept_like_any_other(tmp_path: Path) -> None:
    config = Config(cluster=ClusterConfig(state_dir=str(tmp_path / "state")))
    failures: asyncio.Queue[str] = asyncio.Queue()
    launcher = ProcessLauncher(
        StateDir.create(tmp_path / "state"),
        lambda line: None,
        lambda member, why: failures.put_nowait(why),
        max_restarts=0,
        command=lambda spec: [sys.executable, "-c", "print('.' * 300_000); print('the end'); exit(3)"],
    )
    await launcher.open()
    await launcher.start(RoleSpec(NAME, Role.CONDUCTOR, NodeId("a"), config, "127.0.0.1:1", Path("none")))
    assert "exit code 3: the end" in await asyncio.wait_for(failures.get(), 10.0)
    await launcher.stop()


async def test_a_frozen_process_wakes_as_a_newer_life_of_the_same_process(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        first = await h.live_one()
        os.kill(first.pid, signal.SIGSTOP)
        await h.peers.until(lambda: (first.pid, "silent") in [life[:2] for life in h.lives], 10.0, "silence")
        os.kill(first.pid, signal.SIGCONT)
        await h.peers.until(lambda: first.pid in [m.pid for m in h.peers.live(Role.CONDUCTOR)], 10.0, "return")
        second = await h.live_one()
        assert (second.pid, second.incarnation > first.incarnation) == (first.pid, True)
        assert second.address != first.address
        async with grpc.aio.insecure_channel(second.address) as channel:
            stats = await pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty())
        assert stats.words["lives"] == f"{first.incarnation} {second.incarnation}"
        assert not any("restart" in line for line in h.said)


async def test_a_process_whose_name_another_one_took_ends(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        first = await h.live_one()
        other = Membership(h.registry.address, h.config.timing, lambda why, replaced: None)
        await other.join(replace(first, incarnation=Incarnation(first.incarnation + 1), pid=os.getpid()))
        await h.peers.until(lambda: any("exit code 75" in line for line in h.said), 10.0, "end")
        await other.leave()


async def test_a_child_stops_when_its_launcher_is_gone(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        spec = RoleSpec(MemberId("orphan"), Role.CONDUCTOR, NodeId("a"), h.config, h.registry.address, Path("none"))
        file = tmp_path / "orphan.json"
        file.write_text(spec.to_json())
        lifeline, held = os.pipe()
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("dummy_role.py")), str(file), stdin=lifeline
        )
        os.close(lifeline)
        await h.peers.until(lambda: h.peers.get(MemberId("orphan")) is not None, 30.0, "orphan")
        os.close(held)
        assert await asyncio.wait_for(child.wait(), 15.0) == 0
