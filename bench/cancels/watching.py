"""What the processes of a cluster say themselves: gauges, handles, the instants of every request; and pauses of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import grpc

from moonpool.bench.cancels.scenes import Pause
from moonpool.cluster.survey import members
from moonpool.core.errors import NoPath
from moonpool.core.idle import not_idle
from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.membership import Liveness, Member
from moonpool.core.windows import Window, window_of
from moonpool.wire import pb
from moonpool.wire.channels import dial

TIMEOUT_S = 20.0  # a machine may be crowded
HANDLES = ("process_threads", "process_handles", "process_sockets")
Name = tuple[str, int]  # request, attempt


class Watch:
    """Over the members that live when it is opened. Their restarts would be a fault of their own."""

    def __init__(self, found: list[Member]) -> None:
        self.members = found
        self._channels = {m.id: dial(m.address) for m in found}
        self._next = dict.fromkeys(self._channels, 0)
        self._gateways: dict[Name, Lifetime] = {}
        self._parts: dict[Role, dict[Name, Lifetime]] = {role: {} for role in (Role.DECODE, Role.PREFILL, Role.STORE)}
        self.struck: Counter[Window] = Counter()
        self.too_late = 0  # cancelled when all was over
        self.held_s: list[float] = []  # from the gateway's word to the last process that let go

    @classmethod
    @asynccontextmanager
    async def open(cls, registry: str) -> AsyncIterator[Watch]:
        watch = cls([c.member for c in await members(registry) if c.liveness is Liveness.LIVE])
        try:
            yield watch
        finally:
            for channel in watch._channels.values():
                await channel.close()

    def of(self, role: Role, node: str = "") -> list[Member]:
        return [m for m in self.members if m.role is role and node in ("", m.node)]

    async def numbers(self) -> dict[str, dict[str, float]]:
        async def ask(member: Member) -> dict[str, float]:
            stub = pb.admin_rpc.AdminStub(self._channels[member.id])
            return dict((await stub.Stats(pb.types.Empty(), timeout=TIMEOUT_S)).numbers)

        try:
            told = await asyncio.gather(*map(ask, self.members))
        except grpc.aio.AioRpcError as e:
            raise NoPath(f"a process does not answer: {e.code().name}: {e.details()}", retry_after_s=1.0) from e
        return {member.id: numbers for member, numbers in zip(self.members, told, strict=True)}

    async def busy(self) -> dict[str, float]:
        """Gauges that are not at their idle value: ``member.gauge`` -> value."""
        told = await self.numbers()
        return {f"{member}.{gauge}": value for member, n in told.items() for gauge, value in not_idle(n).items()}

    async def idle(self, limit_s: float) -> dict[str, float]:
        """What is still busy after ``limit_s``; nothing, as soon as nothing is."""
        until = asyncio.get_running_loop().time() + limit_s
        while True:
            busy = await self.busy()
            if not busy or asyncio.get_running_loop().time() > until:
                return busy
            await asyncio.sleep(0.05)

    async def handles(self) -> dict[str, float]:
        told = await self.numbers()
        return {f"{member}.{name}": n[name] for member, n in told.items() for name in HANDLES if name in n}

    async def forget_pages(self) -> None:
        """Prefill workers drop their cached pages: prefixes come from the pool."""
        for member in self.of(Role.PREFILL):
            with suppress(grpc.aio.AioRpcError):
                await pb.admin_rpc.AdminStub(self._channels[member.id]).ClearDevicePages(pb.types.Empty(), timeout=TIMEOUT_S)

    # -- lifetimes ---------------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Takes in the lifetimes that ended since the last call."""
        for member in self.members:
            into = self._gateways if member.role is Role.GATEWAY else self._parts.get(member.role)
            if into is not None:
                while await self._read(member, into):
                    pass

    async def _read(self, member: Member, into: dict[Name, Lifetime]) -> bool:
        request = pb.admin.LivesRequest(after=self._next[member.id])
        reply = await pb.admin_rpc.AdminStub(self._channels[member.id]).Lives(request, timeout=TIMEOUT_S)
        self._next[member.id] = reply.next
        told = json.loads(reply.json)
        for name, attempt, instants in told:
            into[name, attempt] = Lifetime({Instant(instant): at for instant, at in instants.items()})
        return bool(told)

    def tally(self) -> Counter[Window]:
        """Judges what was read since the last call, and forgets it. Call it when nothing is in flight."""
        found: Counter[Window] = Counter()
        for name, gateway in self._gateways.items():
            parts = {role: known.get(name) for role, known in self._parts.items()}
            window = window_of(gateway, parts[Role.DECODE], parts[Role.PREFILL], parts[Role.STORE])
            if window is not None:
                found[window] += 1
                self._hold(gateway, [part for part in parts.values() if part is not None])
            elif Instant.CANCELLED in gateway.at:
                self.too_late += 1
        self.struck += found
        for known in (self._gateways, *self._parts.values()):
            known.clear()
        return found

    def _hold(self, gateway: Lifetime, parts: list[Lifetime]) -> None:
        last = max((part.at.get(Instant.FINISHED, 0.0) for part in parts), default=0.0)
        self.held_s.append(max(last - gateway.at[Instant.CANCELLED], 0.0))


@asynccontextmanager
async def pausing(pause: Pause | None, watch: Watch, random: Random) -> AsyncIterator[None]:
    """Stops one of those meant at a time, again and again, while the block runs. All go on afterwards."""
    targets = watch.of(pause.role, pause.node) if pause is not None else []
    if pause is None or not targets:
        yield
        return
    task = asyncio.create_task(_pauses(pause, [m.pid for m in targets], random))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _pauses(pause: Pause, pids: list[int], random: Random) -> None:
    while True:
        pid = random.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(random.uniform(*pause.stop_ms) / 1e3)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(random.uniform(*pause.run_ms) / 1e3)
