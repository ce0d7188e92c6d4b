from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import structlog

from moonpool.cluster import process, role_switch
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.membership import Membership
from moonpool.cluster.process import Made, Process, Say
from moonpool.cluster.registry import Registry
from moonpool.cluster.spec import RoleSpec, with_absolute_paths
from moonpool.core.config import ClusterConfig, Config, TimingConfig
from moonpool.core.errors import Busy, InvalidRequest
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange, Service, WorkerReport
from moonpool.wire import pb

NAME = MemberId("prefill-0")
TIMING = TimingConfig(heartbeat_ms=20, drain_ms=200)


class Worker:
    """A service that has ``live`` requests."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.live = 0
        self.closed = False

    def numbers(self) -> dict[str, float]:
        return {"requests_live": float(self.live)}

    def words(self) -> dict[str, str]:
        return {}

    def report(self) -> WorkerReport | None:
        return None

    async def drain(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self.live and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.closed = True


class House:
    def __init__(self, folder: Path, role: Role) -> None:
        config = Config(timing=TIMING, cluster=ClusterConfig(state_dir=str(folder / "state")))
        self.config = with_absolute_paths(config, folder)
        self.state = StateDir.create(folder / "state")
        self.role = role
        self.registry = Registry(TIMING)
        self.services: list[Worker] = []
        self.told: list[tuple[str, str, bool]] = []
        self.died: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.broken: BaseException | None = None
        self.on_again: Callable[[], None] = lambda: None

    async def start(self) -> None:
        address = await self.registry.start("127.0.0.1")
        self.peers = Membership(address, TIMING, lambda why, replaced: None)
        self.peers.subscribe(self._hear)
        self.spec = RoleSpec(NAME, self.role, NodeId("a"), self.config, address, Path("none"))
        self.process = Process(self.spec, self._make, self.said.put_nowait, self.died.set_result)
        self.life = asyncio.create_task(self.process.live())
        await self.live_as(self.role)

    async def _make(self, spec: RoleSpec, member: Member, peers: Membership, say: Say) -> Made:
        async def again(member: Member) -> tuple[Service, Member]:
            self.on_again()
            if self.broken is not None:
                raise self.broken
            return self._service(member.role), member

        return Made(self._service(spec.role), member, again if spec.role is not Role.GATEWAY else None)

    def _service(self, role: Role) -> Worker:
        self.services.append(Worker(role))
        return self.services[-1]

    @property
    def closed(self) -> list[bool]:
        return [service.closed for service in self.services]

    def _hear(self, change: MemberChange) -> None:
        self.told.append((change.member.role.value, change.liveness.value, change.member.ready))

    async def live_as(self, role: Role) -> None:
        def there() -> bool:
            change = self.peers.get(NAME)
            return (
                change is not None and change.liveness is Liveness.LIVE and change.member.role is role and change.member.ready
            )

        await self.peers.until(there, 10.0, f"life as {role}")

    async def says(self, start: str) -> None:
        async with asyncio.timeout(30.0):
            while not (await self.said.get()).startswith(start):
                pass

    async def not_ready(self) -> None:
        await self.peers.until(lambda: self.told[-1][2] is False, 5.0, "draining")

    async def stop(self) -> None:
        self.process.stop()
        await self.life
        await self.peers.leave()
        await self.registry.close()


@asynccontextmanager
async def house(folder: Path, role: Role = Role.PREFILL) -> AsyncIterator[House]:
    made = House(folder, role)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@pytest.fixture(autouse=True)
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "open_log", lambda *_: structlog.get_logger())


async def test_a_worker_drains_leaves_and_is_back_as_a_newer_life_of_the_other_role(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        first = h.peers.get(NAME)
        h.services[0].live = 1
        h.process.switch("decode", 5.0)
        await h.not_ready()
        await asyncio.sleep(0.2)
        assert h.closed == [False], "a running request must finish first"
        h.services[0].live = 0
        await h.live_as(Role.DECODE)
        assert h.closed == [True, False]
        assert [s.role for s in h.services] == [Role.PREFILL, Role.DECODE]
        now = h.peers.get(NAME)
        assert first is not None and now is not None
        assert now.member.incarnation > first.member.incarnation
        assert now.member.pid == first.member.pid
        assert h.told == [
            ("prefill", "live", True),
            ("prefill", "live", False),
            ("prefill", "gone", False),
            ("decode", "live", True),
        ]
        await h.says("back as decode")
        h.process.switch("prefill", 5.0)
        await h.live_as(Role.PREFILL)
        assert not h.died.done()


async def test_nothing_of_a_life_takes_memory_any_more_when_the_next_one_begins(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        service = h.services.pop()
        service.itself = service  # type: ignore[attr-defined]  # as services hang together
        before, left = weakref.ref(service), list[object]()
        del service
        h.on_again = lambda: left.append(before())
        h.process.switch("decode", 5.0)
        await h.live_as(Role.DECODE)
        assert left == [None]


async def test_a_switch_asked_for_as_soon_as_others_hear_of_the_first_life_ends_all_of_that_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, welcome = Membership.join, asyncio.Event()

    async def heard_of_first(peers: Membership, member: Member) -> None:
        await join(peers, member)
        await welcome.wait()

    monkeypatch.setattr(Membership, "join", heard_of_first)
    async with house(tmp_path) as h:
        h.process.switch("decode", 5.0)
        await h.not_ready()
        await asyncio.sleep(0.1)
        assert h.closed == [False], "it has not begun in full"
        welcome.set()
        await h.says("back as decode")
        assert [task.get_name() for task in asyncio.all_tasks()].count("reporter") == 1


async def test_what_does_not_finish_in_time_is_left_to_the_next_attempt(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        h.services[0].live = 1
        h.process.switch("decode", 0.1)
        await h.live_as(Role.DECODE)
        assert h.services[0].closed


async def test_a_restart_keeps_the_new_role_and_a_new_cluster_begins_as_configured(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        assert role_switch.in_kept_role(h.spec) == h.spec
        h.process.switch("decode")
        await h.live_as(Role.DECODE)
        assert role_switch.in_kept_role(h.spec).role is Role.DECODE
    h.state.clear()
    assert role_switch.in_kept_role(h.spec).role is Role.PREFILL


@pytest.mark.parametrize(
    "broken",
    [RuntimeError("no room for another life"), asyncio.CancelledError("a channel was closed under a call")],
    ids=["error", "call ended from outside"],
)
async def test_a_switch_that_fails_ends_the_process_which_then_restarts_in_the_new_role(
    tmp_path: Path, broken: BaseException
) -> None:
    async with house(tmp_path) as h:
        h.broken = broken
        h.process.switch("decode")
        await asyncio.wait_for(h.died, 5.0)
        assert role_switch.in_kept_role(h.spec).role is Role.DECODE


async def test_a_stop_while_draining_ends_the_process_in_its_old_role(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        h.services[0].live = 1
        h.process.switch("decode", 60.0)
        await h.not_ready()
        h.process.stop()
        async with asyncio.timeout(5.0):
            await h.life
        assert role_switch.in_kept_role(h.spec).role is Role.PREFILL


async def test_only_ready_workers_of_another_role_switch(tmp_path: Path) -> None:
    async with house(tmp_path) as h:
        with pytest.raises(InvalidRequest, match="prefill-0 is a prefill worker already"):
            h.process.switch("prefill")
        with pytest.raises(InvalidRequest, match="use prefill or decode"):
            h.process.switch("both")
        h.services[0].live = 1
        h.process.switch("decode", 60.0)
        with pytest.raises(Busy, match="prefill-0 is not ready"):
            h.process.switch("decode")
        change = h.peers.get(NAME)
        assert change is not None
        async with grpc.aio.insecure_channel(change.member.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await pb.admin_rpc.AdminStub(channel).SwitchRole(pb.admin.SwitchRoleRequest(role="decode"))
            assert "not ready" in (told.value.details() or "")


async def test_a_process_that_is_no_worker_has_no_other_role(tmp_path: Path) -> None:
    async with house(tmp_path, Role.CONDUCTOR) as h:
        with pytest.raises(InvalidRequest, match="a conductor process, which has no other role"):
            h.process.switch("decode")
