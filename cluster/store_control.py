"""The control API of the pooled store over all nodes: what ``moonpool store`` does, for any program.

Every call goes to the nodes at once and answers one ``Reply`` per node: a node that does not answer says why in
``trouble`` and holds nobody up. Calls with ``dry_run`` answer the same and change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import grpc

from moonpool.cluster.survey import members
from moonpool.core.errors import InvalidRequest, MoonpoolError, NoPath
from moonpool.core.ids import Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member
from moonpool.core.use import Use
from moonpool.kvstore.codecs.copies import copy_key
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import error_of

CALL_S = 10.0
GRACE_S = 2.0  # for the answer of a call that used its whole deadline
MESSAGE_BYTES = 64 << 20

Facts = dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one node said: named values, or why it said nothing. ``rows`` where the answer is a list."""

    node: str
    facts: Facts = field(default_factory=dict)
    rows: tuple[Facts, ...] = ()
    trouble: str = ""

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"node": self.node, **self.facts}
        if self.rows:
            out["rows"] = list(self.rows)
        return out | ({"trouble": self.trouble} if self.trouble else {})


@dataclass(frozen=True, slots=True)
class What:
    """What ``clean`` clears: exactly one of these. Keys go with everything that follows them."""

    keys: tuple[bytes, ...] = ()
    model: str = ""  # fingerprint of a model, or of one layout
    tenant: str = ""
    everything: bool = False


class StoreControl:
    """Use as ``async with await StoreControl.open(registry) as control``. ``stores`` are the live nodes it speaks to."""

    def __init__(self, stores: Sequence[Member]) -> None:
        self.stores = tuple(stores)
        options = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.max_send_message_length", MESSAGE_BYTES)]
        self._channels = {m.node: grpc.aio.insecure_channel(m.address, options=options) for m in stores}

    @classmethod
    async def open(cls, registry: str, nodes: Sequence[str] = ()) -> StoreControl:
        """``nodes``: their ids; none: all live ones. InvalidRequest names an id that is not live. NoPath: none is."""
        live = [c.member for c in await members(registry) if c.liveness is Liveness.LIVE and c.member.role is Role.STORE]
        if not live:
            raise NoPath("node: no store node is live; is the cluster up?", retry_after_s=1.0)
        known = {m.node: m for m in live}
        for node in nodes:
            if node not in known:
                raise InvalidRequest(
                    f"--node: {node!r} is no live store node; use one of {', '.join(sorted(known))}", param="node"
                )
        return cls([m for m in live if not nodes or m.node in nodes])

    async def __aenter__(self) -> StoreControl:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    def member(self, node: str) -> Member:
        """InvalidRequest where ``node`` is none of ours."""
        found = next((m for m in self.stores if m.node == node), None)
        if found is None:
            names = ", ".join(sorted(m.node for m in self.stores))
            raise InvalidRequest(f"node: {node!r} is no live store node; use one of {names}", param="node")
        return found

    def resolved(self, what: What) -> What:
        """``what`` with the name of a served model replaced by its fingerprint."""
        by_name = {m.model: m.layout.model for m in self.stores if m.layout is not None and m.model}
        return replace(what, model=by_name.get(what.model, what.model))

    # Looking.

    async def inspect(self, keys: Sequence[bytes]) -> list[Reply]:
        """Per node: ``leading`` blocks held, ``held`` ones in all, and a row for each block that is there."""
        return await self._each(lambda stub: _inspect(stub, keys))

    async def stats(self) -> list[Reply]:
        """Per node every number and word; rows: what each tenant uses."""
        return await self._each(_describe)

    async def quotas(self) -> list[Reply]:
        return await self._each(_quotas)

    # Changing.

    async def hold(self, keys: Sequence[bytes], tenant: str, *, hard: bool) -> list[Reply]:
        """Pins that last until ``unhold``: soft ones are evicted last, hard ones never."""
        request = pb.store_admin.HoldRequest(tenant=tenant, keys=keys, hard=hard)
        return await self._each(lambda stub: _hold(stub.Hold(request, timeout=CALL_S)))

    async def unhold(self, keys: Sequence[bytes], tenant: str) -> list[Reply]:
        request = pb.store_admin.HoldRequest(tenant=tenant, keys=keys)
        return await self._each(lambda stub: _hold(stub.Unhold(request, timeout=CALL_S)))

    async def clean(self, what: What, *, dry_run: bool) -> list[Reply]:
        """Clear what is not in use."""
        request = pb.store_admin.CleanRequest(
            keys=what.keys, model=what.model, tenant=what.tenant, everything=what.everything, dry_run=dry_run
        )
        return await self._each(lambda stub: _cleaned(stub.Clean(request, timeout=CALL_S)))

    async def compress(self, keys: Sequence[bytes], codec: str, *, dry_run: bool) -> list[Reply]:
        """The leading blocks of ``keys`` that are there get a copy by ``codec``; full copies that nobody uses go."""
        request = pb.store_admin.CompressRequest(keys=keys, codec=codec, dry_run=dry_run)
        return await self._each(lambda stub: _compressed(stub.Compress(request, timeout=60.0)))

    async def set_quota(self, tenant: str, size: int, *, dry_run: bool) -> list[Reply]:
        """Bytes of each node's pool that ``tenant`` may fill; 0: no quota. What is above goes as the tenant stores more."""
        request = pb.store_admin.SetQuotaRequest(tenant=tenant, bytes=size, dry_run=dry_run)
        return await self._each(lambda stub: _quota_set(stub.SetQuota(request, timeout=CALL_S)))

    async def copy(self, keys: Sequence[bytes], source: str, target: str, *, dry_run: bool, deadline_s: float = 60.0) -> Reply:
        """Bring the leading blocks of ``keys`` that ``source`` holds to ``target``, and keep them there; lossy copies as such.

        ``blocks``: how many leading ones it holds then; ``wanted``: how many the source had.
        """
        if source == target:
            raise InvalidRequest(f"--to: {target!r} is the source, too; name another node", param="to")
        origin, goal = self.member(source), self.member(target)
        there, here = await asyncio.gather(
            self._ask(origin, lambda s: _inspect(s, keys)), self._ask(goal, lambda s: _inspect(s, keys))
        )
        if there.trouble or here.trouble:
            return there if there.trouble else here
        wanted, have = int(there.facts["leading"]), int(here.facts["leading"])
        facts: Facts = {"wanted": wanted, "blocks": have, "brought": 0, "bytes": 0, "carrier": ""}
        if wanted <= have:
            return Reply(target, facts)
        if dry_run:
            size = sum(int(row["bytes"]) for row in there.rows[have:wanted])
            return Reply(target, facts | {"blocks": wanted, "brought": wanted - have, "bytes": size})
        return await self._ask(goal, lambda _: self._bring(origin, goal, keys, there.rows[:wanted], facts, deadline_s))

    async def _bring(
        self, origin: Member, goal: Member, keys: Sequence[bytes], rows: Sequence[Facts], facts: Facts, deadline_s: float
    ) -> Reply:
        """Full blocks by their own keys; then, where only lossy copies are left, all copies of the sequence by theirs."""
        admin = pb.store_admin_rpc.StoreAdminStub(self._channels[origin.node])
        known = await admin.Describe(pb.types.Empty(), timeout=CALL_S)
        layouts = {layout.fingerprint: layout for layout in (from_wire(one.layout, KVLayout) for one in known.layouts)}
        full = len(list(takewhile(lambda row: not row["codec"], rows)))
        parts = [(keys[:full], rows[:full])] if full else []
        if full < len(rows):
            codec = str(rows[full]["codec"])
            parts.append(([copy_key(key, codec) for key in keys[: len(rows)]], rows[full:]))
        begun = asyncio.get_running_loop().time()
        for names, part in parts:
            request = pb.store.ReplicateRequest(keys=names, node=origin.node)
            request.deadline_ms = max(int((deadline_s - (asyncio.get_running_loop().time() - begun)) * 1e3), 1)
            to_wire(layouts[str(part[0]["layout"])], request.layout)
            to_wire(Use(str(part[0]["tenant"])), request.use)
            stub: Any = pb.store_rpc.StoreStub(self._channels[goal.node])
            reply = await stub.Replicate(request, timeout=request.deadline_ms / 1e3 + GRACE_S)
            facts = facts | {"bytes": int(facts["bytes"]) + reply.bytes, "carrier": reply.carrier or facts["carrier"]}
        after = await _inspect(pb.store_admin_rpc.StoreAdminStub(self._channels[goal.node]), keys)
        blocks = int(after.facts["leading"])
        return Reply(goal.node, facts | {"blocks": blocks, "brought": max(blocks - int(facts["blocks"]), 0)})

    async def move(
        self, keys: Sequence[bytes], source: str, target: str, *, dry_run: bool, deadline_s: float = 60.0
    ) -> list[Reply]:
        """``copy``; then what the target has sealed is dropped at the source, where nobody uses it there."""
        copied = await self.copy(keys, source, target, dry_run=dry_run, deadline_s=deadline_s)
        if copied.trouble or not copied.facts["blocks"]:
            return [copied]
        sealed = min(int(copied.facts["blocks"]), int(copied.facts["wanted"]))
        request = pb.store_admin.DropRequest(keys=keys[:sealed], dry_run=dry_run)
        return [copied, await self._ask(self.member(source), lambda stub: _cleaned(stub.Drop(request, timeout=CALL_S)))]

    # Asking.

    async def _each(self, call: Callable[[Any], Awaitable[Reply]]) -> list[Reply]:
        return list(await asyncio.gather(*(self._ask(member, call) for member in self.stores)))

    async def _ask(self, member: Member, call: Callable[[Any], Awaitable[Reply]]) -> Reply:
        """The node's own name is put in here; what it refuses, or that it does not answer, is its ``trouble``."""
        stub = pb.store_admin_rpc.StoreAdminStub(self._channels[member.node])
        try:
            reply = await call(stub)
        except grpc.aio.AioRpcError as e:
            return Reply(member.node, trouble=error_of(e, f"store node {member.node}").message)
        except MoonpoolError as e:
            return Reply(member.node, trouble=e.message)
        return Reply(member.node, reply.facts, reply.rows)


async def _inspect(stub: Any, keys: Sequence[bytes]) -> Reply:
    found = await stub.Inspect(pb.store_admin.InspectRequest(keys=keys), timeout=CALL_S)
    rows: list[Facts] = [
        {
            "block": i,
            "key": one.key.hex(),
            "tiers": "+".join(one.tiers),
            "codec": one.codec,
            "layout": one.layout,
            "tenant": one.tenant,
            "held": one.held,
            "bytes": one.bytes,
        }
        for i, one in enumerate(found.blocks)
        if one.tiers
    ]
    return Reply("", {"asked": len(keys), "leading": found.leading, "found": len(rows)}, tuple(rows))


async def _describe(stub: Any) -> Reply:
    found = await stub.Describe(pb.types.Empty(), timeout=CALL_S)
    return Reply("", {**found.numbers, **found.words}, tuple(map(_tenant, found.tenants)))


async def _quotas(stub: Any) -> Reply:
    found = await stub.Quotas(pb.types.Empty(), timeout=CALL_S)
    return Reply("", {"pool_bytes": found.pool_bytes}, tuple(map(_tenant, found.tenants)))


def _tenant(use: Any) -> Facts:
    return {
        "tenant": use.tenant,
        "blocks": use.blocks,
        "used": use.used,
        "quota": use.quota,
        "soft": use.soft,
        "hard": use.hard,
    }


async def _hold(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply("", {"held": done.held, "missing": done.missing})


async def _cleaned(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply("", {"cleared": done.cleared, "kept": done.kept, "bytes": done.bytes})


async def _compressed(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply(
        "",
        {
            "compressed": done.compressed,
            "kept": done.kept,
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
        },
    )


async def _quota_set(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply("", {"before": done.before, "used": done.used, "above": done.above})
