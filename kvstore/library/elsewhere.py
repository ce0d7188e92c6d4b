"""Values that this node does not have in DRAM: brought up from its lower tiers, or over from other nodes, whole or not at all.

Whoever asks knows only a value's last block; the node that has it knows the way there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import structlog

from moonpool.core.errors import LayoutMismatch
from moonpool.core.ids import NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.use import Use
from moonpool.kvstore.index import BlockIndex
from moonpool.wire import pb
from moonpool.wire.convert import from_wire

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

AT_ONCE = 4  # values on their way at a time, for one question
log = structlog.get_logger(__name__)


def path_to(index: BlockIndex, key: bytes) -> list[int]:
    """Rows of the blocks that lead to ``key``, the first one first; none where it is not here."""
    row, path = index.row(key), []
    at = -1 if row is None else row
    while at >= 0:
        path.append(at)
        at = index.parent[at]
    return path[::-1]


class Elsewhere:
    """Event-loop only. What cannot be had in time is a miss."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node

    def others(self) -> list[Member]:
        """Store nodes that could be asked."""
        node = self._node.member.node
        return [one for one in self._node.peers.live(Role.STORE) if one.node != node and one.address]

    def could_help(self, keys: Sequence[bytes]) -> bool:
        """Whether any of ``keys`` is here but not in DRAM, or is not here and there are other nodes."""
        index = self._node.pool.held.index
        if self.others() and not all(index.row(key) is not None for key in keys):
            return True
        return any(index.slot[row] < 0 for key in keys for row in path_to(index, key)) if index.on_ssd else False

    async def bring(self, keys: Sequence[bytes], use: Use, deadline_s: float) -> None:
        """Into DRAM here, as far as there is time and room."""
        index, clock = self._node.pool.held.index, self._node.clock
        end = clock() + deadline_s
        missing = [key for key in dict.fromkeys(keys) if index.row(key) is None]
        found = await self._find(missing, deadline_s) if missing else []
        gate = asyncio.Semaphore(AT_ONCE)

        async def fetch(layout: KVLayout, path: Sequence[bytes], source: NodeId) -> None:
            try:
                self._node.pool.register(layout, source)
            except LayoutMismatch as e:
                log.warning("cannot_be_had", source=source, error=e.message)
                return
            async with gate:
                if (left := end - clock()) > 0:
                    await self._node.fetcher.replicate(layout, path, source, left, use)

        async def raise_up(key: bytes) -> None:
            rows = path_to(index, key)
            if any(index.slot[row] < 0 for row in rows):
                layout = self._node.pool.held.accounts.layout_of[index.account[rows[-1]]]
                async with gate:
                    await self._node.bring(layout, [index.key[row] for row in rows], use, max(end - clock(), 0.0))

        await asyncio.gather(*[fetch(*one) for one in found], *[raise_up(key) for key in keys])

    async def _find(self, keys: Sequence[bytes], deadline_s: float) -> list[tuple[KVLayout, list[bytes], NodeId]]:
        """(layout, the blocks that lead to it, who has them) of those of ``keys`` that some other node has."""
        others = self.others()
        replies = await asyncio.gather(*[self._ask(one, keys, deadline_s) for one in others])
        out = []
        for at in range(len(keys)):
            for other, paths in zip(others, replies, strict=True):
                if at < len(paths) and paths[at].keys:
                    out.append((from_wire(paths[at].layout, KVLayout), list(paths[at].keys), other.node))
                    break
        return out

    async def _ask(self, other: Member, keys: Sequence[bytes], deadline_s: float) -> Sequence[pb.store.Path]:
        try:
            reply = await self._node.fetcher.stub(other.address).Paths(pb.store.KeysRequest(keys=keys), timeout=deadline_s)
        except grpc.aio.AioRpcError as e:
            log.info("not_answered", node=other.node, error=str(e.code()))
            return ()
        paths: Sequence[pb.store.Path] = reply.paths
        return paths
