"""A store node by itself: no registry, no model, no Ray. For users of the store library on this host."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from moonpool.core.config import Config
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member, MemberChange
from moonpool.kvstore.library.objects import RAW_LAYOUTS
from moonpool.kvstore.node import StoreNode

NODE = NodeId("local")


class Nobody:
    """core.membership.Peers of a process that is alone."""

    def get(self, member: MemberId) -> MemberChange | None:
        return None

    def live(self, role: Role) -> list[Member]:
        return []

    def store_of(self, node: NodeId) -> Member | None:
        return None

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        return lambda: None


async def start_alone(config: Config) -> StoreNode:
    """A store node whose only users are on this host. ConfigError where the machine does not allow it."""
    layout = RAW_LAYOUTS[-1]
    me = Member(MemberId(f"store-{NODE}"), Role.STORE, NODE, Incarnation(time.time_ns()), "", os.getpid())
    only_here = config.model_copy(update={"transfer": config.transfer.model_copy(update={"carrier": "segment"})})
    return await StoreNode.start(only_here, me, layout, Nobody())


async def serve_alone(config: Config, say: Callable[[str], None]) -> int:
    """Until SIGTERM or SIGINT; returns the exit code."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _end, ended, number)
    node = await start_alone(config)
    try:
        words, mib = node.words(), 1 << 20
        say(f"pool of {node.slots.total_bytes / mib:.0f} MiB; clients connect to {words['store_socket']}")
        for line in node.lower.lines():
            say(line)
        return await ended
    finally:
        await node.leave()
        await node.close()


def _end(ended: asyncio.Future[int], number: int) -> None:
    if not ended.done():
        ended.set_result(128 + number)
