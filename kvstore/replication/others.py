"""The other store nodes as one of them asks them: what they hold, how much room they have, and to take copies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import numpy as np
import structlog

from moonpool.core.ids import Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.use import Use
from moonpool.kvstore.replication.plan import Room
from moonpool.wire import pb
from moonpool.wire.convert import to_wire

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

ANSWER_S = 2.0  # a node that has not answered by then is no place for copies
KEYS_PER_CALL = 1 << 14  # 256 KiB
log = structlog.get_logger(__name__)


class Others:
    """Event-loop only. A node that does not answer, or is leaving itself, is left out."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node

    def ready(self) -> list[Member]:
        me = self._node.member.node
        return [member for member in self._node.peers.live(Role.STORE) if member.node != me and member.ready]

    async def rooms(self, keys: Sequence[bytes]) -> list[Room]:
        """Which of ``keys`` each of the others holds, and its room."""
        found = await asyncio.gather(*(self._room(member, keys) for member in self.ready()))
        return [room for room in found if room is not None]

    async def _room(self, member: Member, keys: Sequence[bytes]) -> Room | None:
        stub, has = self._node.fetcher.stub(member.address), set[bytes]()
        try:
            for i in range(0, max(1, len(keys)), KEYS_PER_CALL):
                part = keys[i : i + KEYS_PER_CALL]
                reply = await stub.Exists(pb.store.KeysRequest(keys=part), timeout=ANSWER_S)
                bits = np.unpackbits(np.frombuffer(reply.bits, np.uint8), bitorder="little")[: len(part)]
                has.update(key for key, bit in zip(part, bits, strict=True) if bit)
        except grpc.aio.AioRpcError as e:
            log.info("no_place_for_copies", peer=member.id, error=e.details())
            return None
        return None if reply.leaving else Room(member.node, reply.free_bytes, reply.evictable_bytes, has)

    async def replicate(
        self, to: Room, path: Sequence[bytes], layout: KVLayout, use: Use, deadline_s: float
    ) -> tuple[int, int]:
        """Ask ``to`` to take ``path`` from here, on the account of ``use``: (leading blocks it has then, bytes moved).

        (0, 0) where it failed.
        """
        member = self._node.peers.store_of(to.node)
        if member is None:
            return 0, 0
        request = pb.store.ReplicateRequest(keys=path, node=self._node.member.node, deadline_ms=max(1, int(deadline_s * 1e3)))
        to_wire(layout, request.layout)
        to_wire(use, request.use)
        try:
            reply = await self._node.fetcher.stub(member.address).Replicate(request, timeout=deadline_s + ANSWER_S)
        except grpc.aio.AioRpcError as e:
            log.info("copy_refused", peer=member.id, error=e.details())
            return 0, 0
        return reply.blocks, reply.bytes
