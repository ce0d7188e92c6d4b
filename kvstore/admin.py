"""What operators may do to one store node: ``proto/store_admin.proto``, beside the service its workers speak to.

Everything is decided by the pool; here bounds are checked and answers put in words. A destructive call with ``dry_run``
answers what it would have answered, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import wraps
from typing import Any, TypeVar

from moonpool.core.errors import InvalidRequest, MoonpoolError
from moonpool.kvstore.checks import checked_keys
from moonpool.kvstore.codecs.copies import LOSSY, all_keys
from moonpool.kvstore.control import Control
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pool import Cleared
from moonpool.wire import pb
from moonpool.wire.convert import to_wire
from moonpool.wire.status import abort

MAX_NAME = 256
Q = TypeVar("Q")
R = TypeVar("R")


def answered(
    call: Callable[[StoreAdmin, Q, Any], Awaitable[R]],
) -> Callable[[StoreAdmin, Q, Any], Awaitable[R]]:
    """Errors raised on purpose end the call with their status and message."""

    @wraps(call)
    async def guarded(self: StoreAdmin, request: Q, context: Any) -> R:
        try:
            return await call(self, request, context)
        except MoonpoolError as e:
            await abort(context, e)

    return guarded


class StoreAdmin(pb.store_admin_rpc.StoreAdminServicer):
    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._control = Control(node.pool)

    @answered
    async def Inspect(self, request: pb.store_admin.InspectRequest, context: Any) -> pb.store_admin.InspectReply:
        keys = checked_keys(request.keys)
        reply = pb.store_admin.InspectReply()
        for i, key in enumerate(keys):
            state = self._control.state(key)
            reply.blocks.add(
                key=key,
                tiers=state.tiers,
                layout=state.layout,
                tenant=state.tenant,
                held=state.held,
                codec=state.codec,
                bytes=state.bytes,
            )
            if state.tiers and reply.leading == i:
                reply.leading += 1
        return reply

    @answered
    async def Sequences(self, request: pb.store_admin.SequencesRequest, context: Any) -> pb.store_admin.SequencesReply:
        found, more = self._control.sequences(checked_keys(request.keys), request.following)
        reply = pb.store_admin.SequencesReply(more=more)
        for one in found:
            to_wire(one.layout, reply.sequences.add(tenant=one.tenant, keys=one.keys).layout)
        return reply

    @answered
    async def Hold(self, request: pb.store_admin.HoldRequest, context: Any) -> pb.store_admin.HoldReply:
        keys = checked_keys(request.keys)
        held = self._control.hold(_named(request.tenant), keys, request.hard, self._node.clock())
        self._node.changed()
        return pb.store_admin.HoldReply(held=held, missing=len(keys) - held)

    @answered
    async def Unhold(self, request: pb.store_admin.HoldRequest, context: Any) -> pb.store_admin.HoldReply:
        keys = checked_keys(request.keys)
        ended = self._control.unhold(_named(request.tenant), keys, self._node.clock())
        self._node.changed()
        return pb.store_admin.HoldReply(held=ended, missing=len(keys) - ended)

    @answered
    async def Quotas(self, request: pb.types.Empty, context: Any) -> pb.store_admin.QuotasReply:
        return pb.store_admin.QuotasReply(pool_bytes=self._node.pool.slots.total_bytes, tenants=self._tenants())

    @answered
    async def SetQuota(self, request: pb.store_admin.SetQuotaRequest, context: Any) -> pb.store_admin.SetQuotaReply:
        before, used = self._control.set_quota(_named(request.tenant), request.bytes, request.dry_run)
        above = max(used - request.bytes, 0) if request.bytes else 0
        return pb.store_admin.SetQuotaReply(before=before, used=used, above=above)

    def _tenants(self) -> list[pb.store_admin.TenantUse]:
        return [pb.store_admin.TenantUse(**asdict(one)) for one in self._control.tenants()]

    @answered
    async def Drop(self, request: pb.store_admin.DropRequest, context: Any) -> pb.store_admin.CleanReply:
        names = [name for key in checked_keys(request.keys) for name in all_keys(key)]
        return self._cleaned(self._control.drop(names, request.dry_run))

    @answered
    async def Clean(self, request: pb.store_admin.CleanRequest, context: Any) -> pb.store_admin.CleanReply:
        given = [bool(request.keys), bool(request.model), bool(request.tenant), request.everything]
        if sum(given) != 1:
            raise InvalidRequest("clear: name what goes by exactly one of keys, model, tenant, everything", param="keys")
        keys = checked_keys(request.keys)
        model, tenant = _name(request.model, "model"), _name(request.tenant, "tenant")
        if keys:
            return self._cleaned(self._control.clean(keys, request.dry_run))
        total = Cleared(0, 0, 0)
        for part in self._control.clean_all(model, tenant, request.dry_run):
            total = Cleared(total.cleared + part.cleared, total.kept + part.kept, total.bytes + part.bytes)
            self._node.changed()
            await asyncio.sleep(0)  # others have their turn
        return self._cleaned(total)

    def _cleaned(self, done: Cleared) -> pb.store_admin.CleanReply:
        self._node.changed()
        return pb.store_admin.CleanReply(cleared=done.cleared, kept=done.kept, bytes=done.bytes)

    @answered
    async def Compress(self, request: pb.store_admin.CompressRequest, context: Any) -> pb.store_admin.CompressReply:
        if request.codec not in LOSSY:
            raise InvalidRequest(
                f"codec: {request.codec[:MAX_NAME]!r} is no lossy codec; use one of {', '.join(LOSSY)}", param="codec"
            )
        done = await self._node.compressor.compress(checked_keys(request.keys), request.codec, request.dry_run)
        return pb.store_admin.CompressReply(
            compressed=done.made, kept=done.kept, bytes_before=done.bytes_before, bytes_after=done.bytes_after
        )

    @answered
    async def Describe(self, request: pb.types.Empty, context: Any) -> pb.store_admin.Description:
        node = self._node
        reply = pb.store_admin.Description(
            node=node.member.node, numbers=node.numbers(), words=node.words(), tenants=self._tenants()
        )
        for layout, blocks in self._control.layouts():
            to_wire(layout, reply.layouts.add(blocks=blocks, bytes=blocks * layout.slot_bytes).layout)
        return reply


def _name(value: str, field: str) -> str:
    if len(value) > MAX_NAME:
        raise InvalidRequest(f"{field}: {len(value)} characters; at most {MAX_NAME}", param=field)
    return value


def _named(tenant: str) -> str:
    if not tenant:
        raise InvalidRequest("tenant: it is empty; name one", param="tenant")
    return _name(tenant, "tenant")
