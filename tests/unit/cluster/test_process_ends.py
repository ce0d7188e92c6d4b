"""How one process ends: real signals on a real process with the real shell and a service that does nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from moonpool.cluster.membership import Membership
from moonpool.cluster.process import EXIT_LOST, EXIT_RESTART
from moonpool.cluster.registry import Registry
from moonpool.cluster.spec import RoleSpec, with_absolute_paths
from moonpool.core.config import ClusterConfig, Config, ModelConfig, TimingConfig
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member
from moonpool.wire import pb

pytestmark = pytest.mark.processes

NAME = MemberId("conductor-0")


class Child:
    """``kind``: of dummy, by the model's name: busy drains for its whole budget, big takes long to load."""

    def __init__(self, folder: Path, kind: str, drain_ms: int) -> None:
        config = Config(
            model=ModelConfig(name=kind),
            timing=TimingConfig(heartbeat_ms=50, drain_ms=drain_ms),
            cluster=ClusterConfig(state_dir=str(folder / "state")),
        )
        self.config = with_absolute_paths(config, folder)
        self.folder = folder

    async def start(self) -> None:
        self.registry = Registry(self.config.timing)
        address = await self.registry.start("127.0.0.1")
        self.peers = Membership(address, self.config.timing, lambda why, replaced: None)
        (self.folder / "state" / "logs").mkdir(parents=True)
        spec = self.folder / "spec.json"
        spec.write_text(RoleSpec(NAME, Role.CONDUCTOR, NodeId("a"), self.config, address, Path("none")).to_json())
        command = (sys.executable, str(Path(__file__).with_name("dummy_role.py")), str(spec))
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )

    async def says(self, word: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(60.0):
            while (line := await self.process.stdout.readline()) and not line.decode().startswith(word):
                pass
        assert line, f"ended without {word!r}"

    def member(self) -> Member:
        change = self.peers.get(NAME)
        assert change is not None
        return change.member

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30.0)

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self.peers.leave()
        await self.registry.close()


@asynccontextmanager
async def child(folder: Path, kind: str = "plain", drain_ms: int = 10_000) -> AsyncIterator[Child]:
    made = Child(folder, kind, drain_ms)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_signal_ends_it_in_order_with_the_signal_s_code(tmp_path: Path, number: int, code: int) -> None:
    async with child(tmp_path) as c:
        await c.says("ready at ")
        c.process.send_signal(number)
        assert await c.exit_code() == code
        await c.peers.until(lambda: c.peers.get(NAME).liveness is Liveness.GONE, 5.0, "end")  # type: ignore[union-attr]
        assert c.peers.get(NAME).proof == "left"  # type: ignore[union-attr]


async def test_the_admin_service_ends_it_with_0_and_asks_for_a_new_life_by_a_code_of_its_own(tmp_path: Path) -> None:
    for call, code in (("Stop", 0), ("Restart", EXIT_RESTART)):
        (tmp_path / call).mkdir()
        async with child(tmp_path / call) as c:
            await c.says("ready at ")
            await c.peers.until(lambda c=c: c.peers.get(NAME) is not None, 5.0, "member")  # type: ignore[misc]
            async with grpc.aio.insecure_channel(c.member().address) as channel:
                await getattr(pb.admin_rpc.AdminStub(channel), call)(pb.types.Empty(), timeout=5.0)
            assert await c.exit_code() == code


async def test_it_ends_at_once_with_a_code_of_its_own_where_what_it_needs_is_lost(tmp_path: Path) -> None:
    async with child(tmp_path, "maimed") as c:
        assert await c.exit_code() == EXIT_LOST


async def test_it_is_not_ready_while_it_drains_and_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with child(tmp_path, "busy", drain_ms=60_000) as c:
        await c.says("ready at ")
        c.process.send_signal(signal.SIGTERM)
        await c.says("drains")
        await c.peers.until(lambda: c.member().ready is False, 5.0, "readiness to end")
        assert c.peers.get(NAME).liveness is Liveness.LIVE  # type: ignore[union-attr]
        c.process.send_signal(signal.SIGINT)
        assert await c.exit_code() == 130


async def test_it_leaves_when_its_budget_is_over_whatever_is_left(tmp_path: Path) -> None:
    async with child(tmp_path, "busy", drain_ms=300) as c:
        await c.says("ready at ")
        c.process.send_signal(signal.SIGTERM)
        assert await c.exit_code() == 143


async def test_told_to_stop_while_it_loads_it_does_not_finish_loading(tmp_path: Path) -> None:
    async with child(tmp_path, "big") as c:
        await c.says("loading")
        began = time.monotonic()
        c.process.send_signal(signal.SIGTERM)
        assert await c.exit_code() == 143
        assert time.monotonic() - began < 30.0, "it loads for a minute"
