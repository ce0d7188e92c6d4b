"""Processes' memberships over etcd, and what each was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.client import Etcd
from moonpool.cluster.etcd.login import Login
from moonpool.cluster.membership import Membership
from moonpool.core.config import TimingConfig
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member, MemberChange

TIMING = TimingConfig(heartbeat_ms=50, silent_after_ms=1_000, registry_return_ms=600)
NAME = MemberId("prefill-0")


def member(name: str = NAME, role: Role = Role.PREFILL, incarnation: int = 1) -> Member:
    return Member(MemberId(name), role, NodeId("a"), Incarnation(incarnation), "host:1", pid=1)


async def eventually(true: Callable[[], bool], limit_s: float = 15.0) -> None:
    """For what nobody tells."""
    async with asyncio.timeout(limit_s):
        while True:
            if true():
                return
            await asyncio.sleep(0.02)


class Seen:
    """One process's membership, and what it was told in order."""

    def __init__(self, registry: str, timing: TimingConfig = TIMING) -> None:
        self.fenced: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        self.told: list[tuple[str, int, str]] = []
        self.peers = Membership(registry, timing, lambda why, replaced: self.fenced.set_result((why, replaced)))
        self.peers.subscribe(self._hear)

    def _hear(self, change: MemberChange) -> None:
        self.told.append((change.member.id, change.member.incarnation, change.liveness.value))

    async def until(self, condition: Callable[[], bool], what: str = "change") -> None:
        await self.peers.until(condition, 15.0, what)

    async def hears(self, *what: tuple[str, int, str]) -> None:
        await self.until(lambda: all(w in self.told for w in what), str(what))

    async def shows(self, gauge: str, true: Callable[[float], bool], limit_s: float = 15.0) -> None:
        await eventually(lambda: true(self.peers.numbers()[gauge]), limit_s)

    def known(self, name: str = NAME) -> MemberChange:
        known = self.peers.get(MemberId(name))
        assert known is not None
        return known


@asynccontextmanager
async def members(registry: str, size: int, timing: TimingConfig = TIMING) -> AsyncIterator[list[Seen]]:
    seen = [Seen(registry, timing) for _ in range(size)]
    try:
        yield seen
    finally:
        await asyncio.gather(*(s.peers.leave() for s in seen))


async def beating(etcd: Etcd, address: EtcdAddress, count: int, limit_s: float = 30.0) -> None:
    """Until so many members have a lease."""
    async with asyncio.timeout(limit_s):
        while True:
            items, _ = await etcd.read(address.beats)
            if len(items) == count:
                return
            await asyncio.sleep(0.05)


@asynccontextmanager
async def operator(registry: str) -> AsyncIterator[tuple[Etcd, EtcdAddress]]:
    """Someone with a client of their own."""
    address = EtcdAddress.parse(registry)
    etcd = Etcd(address.endpoints[0], lambda: None, Login.read(address))
    try:
        yield etcd, address
    finally:
        etcd.close()
