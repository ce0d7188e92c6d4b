"""Asks every process what it says about itself, again and again, over connections that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio

from moonpool.cluster.survey import Answer, trouble_of
from moonpool.core.membership import Liveness, MemberChange
from moonpool.wire import pb
from moonpool.wire.channels import dial

AT_ONCE = 16
TIMEOUT_S = 2.0


class Poller:
    """One event loop. Who does not answer in time costs the others nothing."""

    def __init__(self, timeout_s: float = TIMEOUT_S, at_once: int = AT_ONCE) -> None:
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(at_once)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def look(self, changes: Iterable[MemberChange]) -> list[Answer]:
        """One answer for each, in their order. Connections to members that are not among them are given up."""
        known = list(changes)
        live = {change.member.address for change in known if change.liveness is Liveness.LIVE}
        for address in self._channels.keys() - live:
            await self._channels.pop(address).close()
        return list(await asyncio.gather(*(self._ask(change) for change in known)))

    def channel(self, address: str) -> grpc.aio.Channel:
        """To a live member; kept for the next call."""
        if address not in self._channels:
            self._channels[address] = dial(address)
        return self._channels[address]

    async def _ask(self, change: MemberChange) -> Answer:
        if change.liveness is not Liveness.LIVE:
            return Answer(change)
        async with self._turns:
            stub = pb.admin_rpc.AdminStub(self.channel(change.member.address))
            try:
                stats = await stub.Stats(pb.types.Empty(), timeout=self._timeout_s)
            except grpc.aio.AioRpcError as e:
                return Answer(change, trouble=trouble_of(e))
        return Answer(change, dict(stats.numbers), dict(stats.words))

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
