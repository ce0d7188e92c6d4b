"""The control API of the pooled store over all nodes: what ``moonpool store`` does, for any program.

Every call goes to the nodes at once and answers one ``Reply`` per node: a node that does not answer says why in
``trouble`` and holds nobody up. A call that is wrong in itself, so that no node does any of it, is InvalidRequest. Calls
with ``dry_run`` answer the same and change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from moonpool.cluster import store_replies as replies
from moonpool.cluster.store_replies import CALL_S, Facts, Reply
from moonpool.cluster.survey import members
from moonpool.core.errors import InvalidRequest, MoonpoolError, NoPath
from moonpool.core.ids import Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member
from moonpool.core.use import Use
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import error_of

GRACE_S = 2.0  # for the answer of a call that used its whole deadline
MESSAGE_BYTES = 64 << 20


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
        self._channels = {m.node: dial(m.address, options=options) for m in stores}

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

    def member(self, node: str, option: str = "--node") -> Member:
        """InvalidRequest, naming ``option``, where ``node`` is none of ours."""
        found = next((m for m in self.stores if m.node == node), None)
        if found is None:
            names = ", ".join(sorted(m.node for m in self.stores))
            raise InvalidRequest(f"{option}: {node!r} is no live store node; use one of {names}", param=option)
        return found

    def resolved(self, what: What) -> What:
        """``what`` with the name of a served model replaced by its fingerprint."""
        by_name = {m.model: m.layout.model for m in self.stores if m.layout is not None and m.model}
        return replace(what, model=by_name.get(what.model, what.model))

    # Looking.

    async def inspect(self, keys: Sequence[bytes]) -> list[Reply]:
        """Per node: ``leading`` blocks held, ``held`` ones in all, and a row for each block that is there."""
        return await self._each(lambda stub: replies.inspect(stub, keys))

    async def stats(self) -> list[Reply]:
        """Per node every number and word; rows: what each tenant uses."""
        return await self._each(replies.describe)

    async def quotas(self) -> list[Reply]:
        return await self._each(replies.quotas)

    # Changing.

    async def hold(self, keys: Sequence[bytes], tenant: str, *, hard: bool) -> list[Reply]:
        """Pins that last until ``unhold``: soft ones are evicted last, hard ones never."""
        request = pb.store_admin.HoldRequest(tenant=tenant, keys=keys, hard=hard)
        return await self._each(lambda stub: replies.hold(stub.Hold(request, timeout=CALL_S)))

    async def unhold(self, keys: Sequence[bytes], tenant: str) -> list[Reply]:
        request = pb.store_admin.HoldRequest(tenant=tenant, keys=keys)
        return await self._each(lambda stub: replies.unheld(stub.Unhold(request, timeout=CALL_S)))

    async def clean(self, what: What, *, dry_run: bool) -> list[Reply]:
        """Clear what is not in use."""
        request = pb.store_admin.CleanRequest(
            keys=what.keys, model=what.model, tenant=what.tenant, everything=what.everything, dry_run=dry_run
        )
        return await self._each(lambda stub: replies.cleaned(stub.Clean(request, timeout=CALL_S)))

    async def compress(self, keys: Sequence[bytes], codec: str, *, dry_run: bool) -> list[Reply]:
        """The leading blocks of ``keys`` that are there get a copy by ``codec``; full copies that nobody uses go."""
        request = pb.store_admin.CompressRequest(keys=keys, codec=codec, dry_run=dry_run)
        return await self._each(lambda stub: replies.compressed(stub.Compress(request, timeout=60.0)))

    async def set_quota(self, tenant: str, size: int, *, dry_run: bool) -> list[Reply]:
        """Bytes of each node's pool that ``tenant`` may fill; 0: no quota. What is above goes as the tenant stores more."""
        if not 0 <= size < 1 << 63:
            raise InvalidRequest(f"--bytes: {size} is above what any pool has; give less than 8 EiB", param="bytes")
        request = pb.store_admin.SetQuotaRequest(tenant=tenant, bytes=size, dry_run=dry_run)
        return await self._each(lambda stub: replies.set_quota(stub, request))

    async def copy(
        self,
        keys: Sequence[bytes],
        source: str,
        target: str,
        *,
        following: bool = False,
        dry_run: bool,
        deadline_s: float = 60.0,
    ) -> Reply:
        """Bring the leading blocks of ``keys`` that ``source`` holds to ``target``, and keep them there; lossy copies as such.

        With ``following`` what continues the last of them, too. ``wanted``: how many blocks the source gives; ``blocks``:
        how many of them the target holds then.
        """
        return (await self._copy(keys, source, target, following, dry_run, deadline_s))[0]

    async def move(
        self, keys: Sequence[bytes], source: str, target: str, *, dry_run: bool, deadline_s: float = 60.0
    ) -> list[Reply]:
        """``copy`` with what follows; then what the target has sealed is dropped at the source, where nobody uses it."""
        copied, sealed = await self._copy(keys, source, target, True, dry_run, deadline_s)
        if not sealed:
            return [copied]
        request = pb.store_admin.DropRequest(keys=sealed, dry_run=dry_run)
        origin = self.member(source, "--from")
        return [copied, await self._ask(origin, lambda stub: replies.cleaned(stub.Drop(request, timeout=CALL_S)))]

    async def move_out(self, node: str, *, deadline_s: float) -> list[Reply]:
        """``node`` takes no new blocks from now on, and copies to others what only it holds, the hottest first."""
        leaving = self.member(node)
        request = pb.store.MoveOutRequest(deadline_ms=max(int(deadline_s * 1e3), 1))

        async def call(_: Any) -> Reply:
            stub: Any = pb.store_rpc.StoreStub(self._channels[leaving.node])
            done = await stub.MoveOut(request, timeout=deadline_s + GRACE_S)
            names = ("blocks_saved", "bytes_saved", "blocks_left", "bytes_left")
            return Reply("", {name: getattr(done, name) for name in names})

        return [await self._ask(leaving, call)]

    async def _copy(
        self, keys: Sequence[bytes], source: str, target: str, following: bool, dry_run: bool, deadline_s: float
    ) -> tuple[Reply, list[bytes]]:
        """The target's answer, and the names of blocks that both have then, or would have."""
        if source == target:
            raise InvalidRequest(f"--to: {target!r} is the source, too; name another node", param="to")
        origin, goal = self.member(source, "--from"), self.member(target, "--to")
        request = pb.store_admin.SequencesRequest(keys=keys, following=following)
        sequences: list[Any] = []

        async def learn(stub: Any) -> Reply:
            sequences.extend((await stub.Sequences(request, timeout=CALL_S)).sequences)
            return Reply("")

        sealed: list[bytes] = []

        async def bring(_: Any) -> Reply:
            facts, found = await self._bring(origin, goal, sequences, dry_run, deadline_s)
            sealed.extend(found)
            return Reply("", facts)

        learned = await self._ask(origin, learn)
        _require_right([learned])
        return (learned if learned.trouble else await self._ask(goal, bring)), sealed

    async def _bring(
        self, origin: Member, goal: Member, sequences: Sequence[Any], dry_run: bool, deadline_s: float
    ) -> tuple[Facts, list[bytes]]:
        stub: Any = pb.store_rpc.StoreStub(self._channels[goal.node])
        size_of = {key: from_wire(one.layout, KVLayout).slot_bytes for one in sequences for key in one.keys}
        before = await replies.here(stub, list(size_of))
        if dry_run:
            missing = [key for key in size_of if key not in before]
            facts: Facts = {"wanted": len(size_of), "blocks": len(size_of), "brought": len(missing)}
            return facts | {"bytes": sum(size_of[key] for key in missing), "carrier": ""}, list(size_of)
        clock = asyncio.get_running_loop().time
        end, moved, carrier = clock() + deadline_s, 0, ""
        for one in sequences:
            request = pb.store.ReplicateRequest(keys=one.keys, layout=one.layout, node=origin.node)
            request.deadline_ms = max(int((end - clock()) * 1e3), 1)
            to_wire(Use(one.tenant), request.use)
            reply = await stub.Replicate(request, timeout=request.deadline_ms / 1e3 + GRACE_S)
            moved, carrier = moved + reply.bytes, reply.carrier or carrier
        after = await replies.here(stub, list(size_of))
        facts = {"wanted": len(size_of), "blocks": len(after), "brought": len(after) - len(after & before)}
        return facts | {"bytes": moved, "carrier": carrier}, [key for key in size_of if key in after]

    # Asking.

    async def _each(self, call: Callable[[Any], Awaitable[Reply]]) -> list[Reply]:
        answers = list(await asyncio.gather(*(self._ask(member, call) for member in self.stores)))
        _require_right(answers)
        return answers

    async def _ask(self, member: Member, call: Callable[[Any], Awaitable[Reply]]) -> Reply:
        """The node's own name is put in here; what it refuses, or that it does not answer, is its ``trouble``."""
        stub = pb.store_admin_rpc.StoreAdminStub(self._channels[member.node])
        try:
            reply = await call(stub)
        except grpc.aio.AioRpcError as e:
            error = error_of(e, f"store node {member.node}")
            return Reply(member.node, trouble=error.message, wrong=isinstance(error, InvalidRequest))
        except MoonpoolError as e:
            return Reply(member.node, trouble=e.message, wrong=isinstance(e, InvalidRequest))
        return Reply(member.node, reply.facts, reply.rows)


def _require_right(answers: Sequence[Reply]) -> None:
    """InvalidRequest with a node's own words where the call was wrong and nobody did any of it."""
    wrong = next((one for one in answers if one.wrong), None)
    if wrong is not None and all(one.trouble for one in answers):
        raise InvalidRequest(wrong.trouble)
