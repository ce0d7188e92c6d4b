"""Blocks from node to node: this node grants itself a landing for what it lacks, and the other one pushes into it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from moonpool.core.errors import Busy, InvalidRequest, MoonpoolError
from moonpool.core.ids import NodeId, RequestId
from moonpool.core.landing import Landing, LandingSlot, SlotRef, Ticket
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.claims import LandingAsk, Life
from moonpool.kvstore.fair_turns import FairTurns
from moonpool.kvstore.sources import Sources
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import to_wire
from moonpool.wire.status import error_of

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

OURSELVES = 0  # the session number under which the node itself pins
DRAIN_S = 5.0
KEPT_CHANNELS = 64  # to other nodes, whose addresses change with every life
STALE_S = 60.0  # for calls under way on one that is kept no longer
AT_ONCE = 4  # fetches from one node; more wait, and tenants go in turn, by bytes
PIECE = 64  # blocks of one landing of a replica: a full pool then takes a part rather than nothing
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Moved:
    """What one push or fetch moved, and by which carrier (empty: nothing had to move)."""

    bytes: int
    carrier: str


@dataclass(frozen=True, slots=True)
class PushOrder:
    """Push slot ``source`` of our own regions into each landing slot of ``blocks``, then say ``Drained`` to the target."""

    landing: Landing
    targets: tuple[Endpoint, ...]  # of all carriers it has, best first
    target_address: str
    layout: KVLayout
    blocks: tuple[tuple[SlotRef, LandingSlot], ...]


Push = Callable[[PushOrder], Awaitable[Moved]]
"""Returns when the writer's local completions are in and ``Drain`` was said, also after a failure (then it raises)."""


class Fetcher:
    def __init__(self, node: StoreNode, push: Push | None) -> None:
        self._node = node
        self._push = push
        self._coming: dict[bytes, asyncio.Task[Moved]] = {}  # who fetches what: several readers share one fetch
        self._channels: dict[str, Any] = {}
        self._turns: dict[NodeId, FairTurns] = {}  # by source, of those that somebody fetches from
        self._names = count(1)
        self._sources = Sources(node.peers, lambda: node.clock())
        self.bytes_in = 0
        self.bytes_out = 0
        self.failed = 0

    def numbers(self) -> dict[str, float]:
        return {
            "fetch_bytes_in": self.bytes_in,
            "fetch_bytes_out": self.bytes_out,
            "fetches_open": len(set(self._coming.values())),
            "fetches_failed": self.failed,
            "fetches_not_tried": self._sources.not_tried,
        }

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    def stub(self, address: str) -> Any:
        channel = self._channels.pop(address, None) or dial(address)
        self._channels[address] = channel  # the most recently used one comes last
        if len(self._channels) > KEPT_CHANNELS:
            self._node.spawn(self._channels.pop(next(iter(self._channels))).close(STALE_S))
        return pb.store_rpc.StoreStub(channel)

    # The node that lacks blocks.

    async def fetch(
        self,
        session: int,
        layout: KVLayout,
        keys: Sequence[bytes],
        source: NodeId,
        address: str,
        deadline_s: float,
        use: Use = Use(),
        *,
        move: bool = False,
    ) -> tuple[Ticket, Moved]:
        """Pins what is here, brings what is not, and pins the leading blocks that are here then: maybe fewer, or none.

        ``move``: the copies it came from become the first to be evicted there.
        """
        node = self._node
        held = node.pool.pin(session, keys, use, node.clock(), layout.fingerprint)
        moved = Moved(0, "")
        try:
            if len(held.slots) < len(keys):
                moved = await self._bring(layout, keys, len(held.slots), source, address, deadline_s, use, move=move)
            node.sessions.get(session)  # it may be over by now: then nobody would unpin
            return node.pool.pin(session, keys, use, node.clock(), layout.fingerprint), moved
        finally:
            if held.slots:
                node.pool.unpin(session, held.id, node.clock())
            node.changed()

    async def replicate(
        self, layout: KVLayout, keys: Sequence[bytes], source: NodeId, deadline_s: float, use: Use = Use()
    ) -> tuple[int, Moved]:
        """Bring what is not here of ``keys``, a sequence from its first block on, and leave it here without a reader.

        Returns how many leading blocks are here then: fewer where room, time or the source lack. Never raises.
        """
        node = self._node
        end, moved = node.clock() + deadline_s, Moved(0, "")
        while True:
            held = node.pool.pin(OURSELVES, keys, use, node.clock(), layout.fingerprint)
            try:
                have, left = node.pool.lookup(keys), end - node.clock()
                if have == len(keys) or left <= 0:
                    return have, moved
                some = await self._bring(layout, keys[: have + PIECE], have, source, "", left, use, replica=True)
                moved = Moved(moved.bytes + some.bytes, some.carrier or moved.carrier)
                if node.pool.lookup(keys) <= have:
                    return have, moved
            finally:
                if held.slots:
                    node.pool.unpin(OURSELVES, held.id, node.clock())
                node.changed()

    async def _bring(
        self,
        layout: KVLayout,
        keys: Sequence[bytes],
        have: int,
        source: NodeId,
        address: str,
        deadline_s: float,
        use: Use,
        *,
        replica: bool = False,
        move: bool = False,
    ) -> Moved:
        missing = keys[have:]
        known = {self._coming[key] for key in missing if key in self._coming}
        lead = len(list(takewhile(lambda key: key in self._coming, missing)))
        mine = list(takewhile(lambda key: key not in self._coming, missing[lead:]))
        task: asyncio.Task[Moved] | None = None
        store = self._node.peers.store_of(source)
        if mine and store is not None:
            first = have + lead
            parent = keys[first - 1] if first else None
            order = pb.store.PushToRequest(target_address=self._node.member.address, replica=replica, move=move)
            run = partial(self._fetch_run, layout, mine, first, parent, store, address or store.address, use=use, order=order)
            task = self._node.spawn(self._in_turn(source, use.tenant, len(mine) * layout.block_bytes, run, deadline_s))
            self._coming.update(dict.fromkeys(mine, task))
            task.add_done_callback(lambda _: [self._coming.pop(key, None) for key in mine])
            known.add(task)
        if known:
            await asyncio.wait(known, timeout=deadline_s)
        return task.result() if task is not None and task.done() and not task.cancelled() else Moved(0, "")

    async def _in_turn(
        self, source: NodeId, tenant: str, size: int, run: Callable[[float], Awaitable[Moved]], deadline_s: float
    ) -> Moved:
        """``run`` with what is left of ``deadline_s`` once its turn came; nothing where that took too long."""
        turns = self._turns.setdefault(source, FairTurns(AT_ONCE))
        end = self._node.clock() + deadline_s
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(deadline_s):
                    await stack.enter_async_context(turns.turn(tenant, size))
                return await run(max(end - self._node.clock(), 0.001))
        except TimeoutError:
            self.failed += 1
            log.info("fetch_without_a_turn", source=source)
            return Moved(0, "")
        finally:
            if turns.idle and self._turns.get(source) is turns:
                del self._turns[source]

    async def _fetch_run(
        self,
        layout: KVLayout,
        keys: list[bytes],
        first: int,
        parent: bytes | None,
        store: Member,
        address: str,
        deadline_s: float,
        *,
        use: Use,
        order: pb.store.PushToRequest,
    ) -> Moved:
        """Never raises: what did not come is a miss, and counted."""
        node, writer = self._node, Life(store.id, store.incarnation)
        if not self._sources.begin(writer):
            return Moved(0, "")
        ask = LandingAsk(
            RequestId(f"fetch.{node.member.id}.{node.member.incarnation}.{next(self._names)}"),
            0,
            writer,
            None,
            layout,
            tuple(keys),
            first,
            parent=parent,
            generation=node.receiving.generation,
            use=use,
        )
        try:
            landing = await node.grant(ask)
        except Busy as e:
            self.failed += 1
            self._sources.ended(writer, e)
            log.info("fetch_without_room", error=e.message)
            return Moved(0, "")
        try:
            moved = await self._ask_for_push(landing, layout, writer, address, deadline_s, order)
            self._sources.ended(writer, None)
        except MoonpoolError as e:
            self.failed += 1
            self._sources.ended(writer, e)
            log.warning("fetch_failed", source=store.id, error=e.message)
            moved = Moved(0, "")
        finally:
            node.end_landing(landing.id)  # a no-op once the writer has drained; fences what it has not
        self.bytes_in += moved.bytes
        return moved

    async def _ask_for_push(
        self,
        landing: Landing,
        layout: KVLayout,
        writer: Life,
        address: str,
        deadline_s: float,
        request: pb.store.PushToRequest,
    ) -> Moved:
        node = self._node
        to_wire(landing, request.landing)
        for endpoint in await node.receiving.endpoints(writer):
            to_wire(endpoint, request.targets.add())
        to_wire(layout, request.layout)
        try:
            reply = await self.stub(address).PushTo(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as e:
            raise error_of(e, address) from e
        return Moved(reply.bytes, reply.carrier)

    # The node that has them.

    async def push_to(
        self,
        landing: Landing,
        layout: KVLayout,
        targets: Sequence[Endpoint],
        target_address: str,
        deadline_s: float,
        *,
        replica: bool = False,
        move: bool = False,
    ) -> Moved:
        """Pin what we have of the landing's blocks, push it, unpin. Goes on, and drains, if our caller gives up.

        ``move``: what went there is the first to be evicted here.
        """
        pushing = self._node.spawn(self._push_to(landing, layout, targets, target_address, deadline_s, move=move))
        pushing.add_done_callback(_heed)
        moved: Moved = await asyncio.shield(pushing)
        if not replica:
            self._node.spreader.read([slot.slot.key for slot in landing.slots])
        return moved

    async def _push_to(
        self,
        landing: Landing,
        layout: KVLayout,
        targets: Sequence[Endpoint],
        target_address: str,
        deadline_s: float,
        *,
        move: bool,
    ) -> Moved:
        node = self._node
        keys = [slot.slot.key for slot in landing.slots]
        await node.bring(layout, keys, Use(), deadline_s)
        ticket = node.pool.pin(OURSELVES, keys, Use(), node.clock(), layout.fingerprint)
        try:
            sound = await asyncio.to_thread(self._sound, layout, ticket)
            if sound < len(ticket.slots):
                node.pool.quarantine(ticket.slots[sound].key, "push")
                node.changed()
            if not sound or self._push is None:
                await self._drain(landing, target_address)
                return Moved(0, "")
            blocks = tuple(zip(ticket.slots[:sound], landing.slots, strict=False))
            order = PushOrder(landing, tuple(targets), target_address, layout, blocks)
            moved = await self._push(order)
            self.bytes_out += moved.bytes
            if move:
                node.pool.cool(keys[:sound], node.clock())
            return moved
        finally:
            if ticket.slots:
                node.pool.unpin(OURSELVES, ticket.id, node.clock())
            node.changed()

    def _sound(self, layout: KVLayout, ticket: Ticket) -> int:
        """How many leading blocks agree with their digests: a copy that went bad here must not travel on."""
        node = self._node
        for i, ref in enumerate(ticket.slots):
            if not slices.is_whole(layout, node.regions.views[ref.region], ref.offset, ref.key):
                return i
        return len(ticket.slots)

    async def _drain(self, landing: Landing, address: str) -> None:
        me = self._node.member
        request = pb.store.DrainRequest(landing=landing.id, writer=me.id, writer_incarnation=me.incarnation)
        try:
            await self.stub(address).Drain(request, timeout=DRAIN_S)
        except grpc.aio.AioRpcError as e:
            raise error_of(e, address) from e


def _heed(push: asyncio.Task[Moved]) -> None:
    """Its caller may be gone, killed perhaps: then nobody else asks how it ended."""
    if not push.cancelled() and (error := push.exception()) is not None:
        log.info("push_failed", error=str(error))


def require_target(landing: Landing, target: Endpoint) -> None:
    """InvalidRequest where the landing is not one of the endpoint's node."""
    if (landing.node, landing.incarnation) != (target.node, target.incarnation):
        raise InvalidRequest(
            f"landing {landing.id} is of node {landing.node}, the endpoint of node {target.node}", param="landing"
        )
