"""Asks every process what it says about itself, again and again, over connections that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc.aio

from moonpool.cluster.survey import Answer, ask
from moonpool.core.membership import Liveness, MemberChange
from moonpool.wire.channels import dial

AT_ONCE = 16
TIMEOUT_S = 2.0
AGAIN_S = 0.5  # for who did not answer the last time: it shall not hold up every look


class Poller:
    """One event loop. Who does not answer in time costs the others nothing."""

    def __init__(self, timeout_s: float = TIMEOUT_S, at_once: int = AT_ONCE) -> None:
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(at_once)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._late: set[str] = set()  # addresses

    async def look(self, changes: Iterable[MemberChange]) -> list[Answer]:
        """One answer for each, in their order. Connections to members that are not among them are given up."""
        known = list(changes)
        live = {change.member.address for change in known if change.liveness is Liveness.LIVE}
        for address in self._channels.keys() - live:
            await self._channels.pop(address).close()
        self._late &= live
        return list(await asyncio.gather(*(self._ask(change) for change in known)))

    async def _ask(self, change: MemberChange) -> Answer:
        if change.liveness is not Liveness.LIVE:
            return Answer(change)
        async with self._turns:
            address = change.member.address
            if address not in self._channels:
                self._channels[address] = dial(address)
            limit_s = min(self._timeout_s, AGAIN_S) if address in self._late else self._timeout_s
            answer = await ask(change, self._channels[address], limit_s)
        if answer.trouble:
            self._late.add(address)
        else:
            self._late.discard(address)
        return answer

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
