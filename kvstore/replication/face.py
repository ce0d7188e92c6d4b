"""The calls between store nodes and of conductors that move copies, as a part of the node's gRPC face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.core.errors import InvalidRequest, MoonpoolError
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.checks import MAX_KEYS, checked_keys, checked_use
from moonpool.kvstore.library.elsewhere import path_to
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import abort

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

MAX_DEADLINE_MS = 600_000


class ReplicationCalls:
    """Bounds and types are checked here; ``_node`` decides."""

    _node: StoreNode

    async def Replicate(self, request: pb.store.ReplicateRequest, context: Any) -> pb.store.ReplicateReply:
        try:
            self._node.lives.terms.check(request.term)
            layout = from_wire(request.layout, KVLayout)
            self._node.pool.register(layout)
            keys, deadline_s = checked_keys(request.keys), checked_deadline(request.deadline_ms) / 1e3
            if request.node == self._node.member.node:
                raise InvalidRequest(f"node: {request.node} is this node; name the one that has the blocks", param="node")
            blocks, moved = await self._node.fetcher.replicate(
                layout, keys, NodeId(request.node), deadline_s, checked_use(from_wire(request.use, Use))
            )
        except MoonpoolError as e:
            await abort(context, e)
        return pb.store.ReplicateReply(blocks=blocks, bytes=moved.bytes, carrier=moved.carrier)

    async def Warm(self, request: pb.store.WarmRequest, context: Any) -> pb.store.ReplicateReply:
        """``blocks`` lead here, in any tier; ``bytes`` came up: fewer where room or time lack."""
        pool = self._node.pool
        try:
            self._node.lives.terms.check(request.term)
            layout = from_wire(request.layout, KVLayout)
            pool.register(layout)
            keys, deadline_s = checked_keys(request.keys), checked_deadline(request.deadline_ms) / 1e3
            use = checked_use(from_wire(request.use, Use))
            below = len(pool.on_ssd(keys))
            await self._node.bring(layout, keys, use, deadline_s)
        except MoonpoolError as e:
            await abort(context, e)
        came = max(below - len(pool.on_ssd(keys)), 0)
        return pb.store.ReplicateReply(blocks=pool.lookup(keys), bytes=came * layout.slot_bytes)

    async def Cool(self, request: pb.store.KeysRequest, context: Any) -> pb.store.CoolReply:
        try:
            self._node.lives.terms.check(request.term)
            keys = checked_keys(request.keys)
        except MoonpoolError as e:
            await abort(context, e)
        return pb.store.CoolReply(blocks=self._node.pool.cool(keys, self._node.clock()))

    async def Exists(self, request: pb.store.KeysRequest, context: Any) -> pb.store.ExistsReply:
        try:
            keys = checked_keys(request.keys)
        except MoonpoolError as e:
            await abort(context, e)
        here, slots = self._node.pool.held.index, self._node.slots
        found = np.fromiter((here.row(key) is not None for key in keys), bool, len(keys))
        return pb.store.ExistsReply(
            bits=np.packbits(found, bitorder="little").tobytes(),
            free_bytes=slots.free_bytes,
            evictable_bytes=self._node.pool.evictable_bytes,
            leaving=self._node.leaving.begun,
        )

    async def Paths(self, request: pb.store.KeysRequest, context: Any) -> pb.store.PathsReply:
        try:
            keys = checked_keys(request.keys)
        except MoonpoolError as e:
            await abort(context, e)
        reply, index, left = pb.store.PathsReply(), self._node.pool.held.index, MAX_KEYS
        for key in keys:
            path, rows = reply.paths.add(), path_to(index, key)
            left -= len(rows)
            if not rows or left < 0:
                continue
            path.keys.extend(index.key[at] for at in rows)
            to_wire(self._node.pool.held.accounts.layout_of[index.account[rows[-1]]], path.layout)
        return reply

    async def MoveOut(self, request: pb.store.MoveOutRequest, context: Any) -> pb.store.MoveOutReply:
        try:
            deadline_s = checked_deadline(request.deadline_ms) / 1e3
        except MoonpoolError as e:
            await abort(context, e)
        return to_wire(await self._node.leaving.move_out(deadline_s), pb.store.MoveOutReply())


def checked_deadline(deadline_ms: int) -> int:
    if not 0 < deadline_ms <= MAX_DEADLINE_MS:
        raise InvalidRequest(f"deadline_ms: {deadline_ms} is not from 1 to {MAX_DEADLINE_MS}", param="deadline_ms")
    return deadline_ms
