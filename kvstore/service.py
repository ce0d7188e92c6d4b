"""The store node's gRPC face: bounds and types are checked here, everything is decided by the node and its pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from moonpool.core.errors import InvalidRequest, MoonpoolError
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import Landing
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.use import Use
from moonpool.kvstore.checks import MAX_KEYS, checked_key, checked_keys, checked_use
from moonpool.kvstore.claims import LandingAsk, Life, Reserved
from moonpool.kvstore.fetching import DRAIN_S, require_target
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.node_sessions import NodeSession
from moonpool.kvstore.prefix_tiers import PrefixTiers
from moonpool.kvstore.replication.face import ReplicationCalls
from moonpool.kvstore.transfer.carrier import Endpoint
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.frames import MAX_NOTICE_BYTES
from moonpool.wire.guard import require_own_name
from moonpool.wire.status import abort, to_error

MAX_FRAMES = 4096
MAX_CARRIERS = 16
MAX_NAME = 256
MAX_WAIT_MS = 60_000
HELLO_S = 5.0


class StoreService(ReplicationCalls, pb.store_rpc.StoreServicer):
    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._pool = node.pool

    # Sessions.

    async def Session(
        self, requests: AsyncIterator[pb.store.SessionMessage], context: Any
    ) -> AsyncIterator[pb.store.StoreMessage]:
        try:
            session = await self._hello(requests, context)
        except MoonpoolError as e:
            await abort(context, e)
        beats = asyncio.create_task(self._beats(requests, session))
        try:
            yield self._welcome(session)
            while (message := await session.outbox.get()) is not None:
                yield message
            if session.why is not None:
                await abort(context, session.why)
        finally:
            beats.cancel()
            self._node.sessions.end(session, "" if beats.done() else "its stream broke")

    async def _hello(self, requests: AsyncIterator[pb.store.SessionMessage], context: Any) -> NodeSession:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidRequest("session: the first message must be Hello", param="hello") from None
        if first.WhichOneof("kind") != "hello":
            raise InvalidRequest("session: the first message must be Hello", param="hello")
        member = from_wire(first.hello.member, Member)
        await require_own_name(context, member.id)
        return self._node.lives.admit(member)

    async def _beats(self, requests: AsyncIterator[pb.store.SessionMessage], session: NodeSession) -> None:
        try:
            async for _ in requests:
                session.heard = self._node.clock()
        except grpc.RpcError:
            return  # the stream broke: the call itself is cancelled
        self._node.sessions.end(session)  # the worker left

    def _welcome(self, session: NodeSession) -> pb.store.StoreMessage:
        welcome = pb.store.Welcome(
            session=session.number, agent_socket=str(self._node.lives.agent.path), incarnation=self._node.member.incarnation
        )
        for region in self._node.regions.files:
            to_wire(region, welcome.regions.add())
        return pb.store.StoreMessage(welcome=welcome)

    # Landings.

    async def Grant(self, request: pb.store.GrantRequest, context: Any) -> pb.store.GrantReply:
        try:
            landing = await self._node.grant(self._ask(request))
        except MoonpoolError as e:
            return pb.store.GrantReply(error=to_error(e))
        return pb.store.GrantReply(landing=to_wire(landing, pb.types.Landing()))

    def _ask(self, request: pb.store.GrantRequest) -> LandingAsk:
        node = self._node
        layout = self._layout(request.layout, request.writer)
        keys = checked_keys(request.keys)
        if not request.request or len(request.request) > MAX_NAME or not request.writer or len(request.writer) > MAX_NAME:
            raise InvalidRequest(f"grant: request and writer are names of 1 to {MAX_NAME} characters", param="request")
        if request.tail_valid >= layout.block_tokens:
            raise InvalidRequest(
                f"tail_valid: {request.tail_valid} tokens are no unfinished block of {layout.block_tokens}",
                param="tail_valid",
            )
        writer = Life(MemberId(request.writer), Incarnation(request.writer_incarnation))
        node.lives.require_live(writer)
        reader = None
        if request.reader:
            reader = node.lives.reader(Life(MemberId(request.reader), Incarnation(request.reader_incarnation)))
        return LandingAsk(
            RequestId(request.request),
            request.attempt,
            writer,
            reader,
            layout,
            keys,
            request.first_block,
            request.tail_valid,
            checked_key(request.parent) if request.parent else None,
            node.lives.reach(writer),
            node.receiving.generation,
            checked_use(from_wire(request.use, Use)),
        )

    def _layout(self, message: pb.types.KVLayout, who: str) -> KVLayout:
        """The layout of whoever calls, known to the pool from now on. LayoutMismatch where it cannot be."""
        layout = from_wire(message, KVLayout)
        self._pool.register(layout, who)
        return layout

    async def Notify(self, request: pb.store.NotifyRequest, context: Any) -> pb.types.Empty:
        """Answers when the slices are verified: a same-host writer is slowed down to what the node can check."""
        if len(request.frames) > MAX_FRAMES or sum(map(len, request.frames)) > MAX_NOTICE_BYTES:
            await abort(
                context, InvalidRequest(f"notify: more than {MAX_FRAMES} frames or {MAX_NOTICE_BYTES} bytes", param="frames")
            )
        taken = [self._node.verifier.take(frame, "segment") for frame in request.frames]
        results = await asyncio.gather(*taken, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await abort(context, result)
        return pb.types.Empty()

    async def Drain(self, request: pb.store.DrainRequest, context: Any) -> pb.types.Empty:
        self._node.drained(request.landing, Life(MemberId(request.writer), Incarnation(request.writer_incarnation)))
        return pb.types.Empty()

    async def LandingState(self, request: pb.store.LandingRequest, context: Any) -> pb.store.LandingStateReply:
        if request.wait_ms:
            await self._node.verifier.settled(request.landing, min(request.wait_ms, MAX_WAIT_MS) / 1e3)
        reply = pb.store.LandingStateReply(generation=self._node.receiving.generation)
        found = self._pool.landings.missing(request.landing)
        if found is not None:
            reply.known = True
            missing, rejected = found
            reply.missing.extend(pb.store.LandingSlice(block=b, layer=layer) for b, layer in missing)
            reply.rejected.extend(pb.store.LandingSlice(block=b, layer=layer) for b, layer in rejected)
        return reply

    async def EndLanding(self, request: pb.store.LandingRequest, context: Any) -> pb.types.Empty:
        self._node.end_landing(request.landing)
        return pb.types.Empty()

    # Reading.

    async def _keys(self, request: pb.store.KeysRequest, context: Any) -> tuple[bytes, ...]:
        try:
            self._pool.layout(request.layout or self._node.layout.fingerprint)
            return checked_keys(request.keys)
        except MoonpoolError as e:
            await abort(context, e)

    async def _session(self, number: int, context: Any) -> NodeSession:
        try:
            return self._node.sessions.get(number)
        except MoonpoolError as e:
            await abort(context, e)

    async def Lookup(self, request: pb.store.KeysRequest, context: Any) -> pb.store.LookupReply:
        return pb.store.LookupReply(blocks=self._pool.lookup(await self._keys(request, context)))

    async def Pin(self, request: pb.store.KeysRequest, context: Any) -> pb.store.PinReply:
        keys: Sequence[bytes] = await self._keys(request, context)
        use = checked_use(from_wire(request.use, Use))
        tiers = PrefixTiers.before(self._pool, keys)
        if request.load_ms:
            end = self._node.clock() + min(request.load_ms, MAX_WAIT_MS) / 1e3
            layout = self._pool.layout(request.layout or self._node.layout.fingerprint)
            await self._node.bring(layout, keys, use, end - self._node.clock())
            keys = await self._node.compressor.readable(keys, use, end - self._node.clock())
        session = await self._session(request.session, context)  # after what took time: it may be over by now
        ticket = self._pool.pin(session.number, keys, use, self._node.clock(), request.layout)
        tiers.count(self._pool, len(ticket.slots), self._pool.layout(request.layout or self._node.layout.fingerprint))
        return pb.store.PinReply(ticket=to_wire(ticket, pb.types.Ticket()))

    async def Unpin(self, request: pb.store.UnpinRequest, context: Any) -> pb.types.Empty:
        if self._pool.unpin(request.session, request.ticket, self._node.clock()):
            self._node.changed()
        return pb.types.Empty()

    async def Quarantine(self, request: pb.store.QuarantineRequest, context: Any) -> pb.types.Empty:
        self._pool.quarantine(request.key, request.place[:MAX_NAME] or "unnamed")
        self._node.changed()
        return pb.types.Empty()

    # Publishing.

    async def Reserve(self, request: pb.store.KeysRequest, context: Any) -> pb.store.ReserveReply:
        keys = await self._keys(request, context)
        session = await self._session(request.session, context)
        parent = request.parent or None
        reply = pb.store.ReserveReply()
        if self._node.leaving.begun:
            reply.reservations.extend(pb.store.Reservation(key=key, state=Reserved.FULL) for key in keys)
            return reply
        layout = self._pool.layout(request.layout or self._node.layout.fingerprint)
        use = checked_use(from_wire(request.use, Use))
        for one in self._pool.reserve(session.number, session.life, layout, keys, parent, use, self._node.clock()):
            item = reply.reservations.add(key=one.key, state=one.state, id=one.id)
            if one.slot is not None:
                to_wire(one.slot, item.slot)
        self._node.changed()
        return reply

    async def Seal(self, request: pb.store.SealRequest, context: Any) -> pb.types.Empty:
        self._pool.seal(request.session, request.reservations[:MAX_KEYS], self._node.clock())
        self._node.changed()
        return pb.types.Empty()

    async def Abandon(self, request: pb.store.SealRequest, context: Any) -> pb.types.Empty:
        self._pool.abandon(request.session, request.reservations[:MAX_KEYS], self._node.clock())
        self._node.changed()
        return pb.types.Empty()

    async def Ended(self, request: pb.store.EndedRequest, context: Any) -> pb.types.Empty:
        try:
            use = checked_use(from_wire(request.use, Use))
        except MoonpoolError as e:
            await abort(context, e)
        self._pool.ended(use, request.output_tokens, self._node.clock())
        return pb.types.Empty()

    # Between nodes.

    async def Fetch(self, request: pb.store.FetchRequest, context: Any) -> pb.store.FetchReply:
        try:
            layout, use = self._layout(request.layout, "the worker"), checked_use(from_wire(request.use, Use))
            session = self._node.sessions.get(request.session)
            ticket, moved = await self._node.fetcher.fetch(
                session.number,
                layout,
                checked_keys(request.keys),
                NodeId(request.node),
                request.address,
                request.deadline_ms / 1e3,
                use,
                move=request.move,
            )
        except MoonpoolError as e:
            await abort(context, e)
        return pb.store.FetchReply(ticket=to_wire(ticket, pb.types.Ticket()), bytes=moved.bytes, carrier=moved.carrier)

    async def PushTo(self, request: pb.store.PushToRequest, context: Any) -> pb.store.PushToReply:
        try:
            layout = self._layout(request.layout, request.target_address)
            landing = from_wire(request.landing, Landing)
            targets = [from_wire(one, Endpoint) for one in request.targets[:MAX_CARRIERS]]
            for one in targets:
                require_target(landing, one)
            checked_keys([slot.slot.key for slot in landing.slots])
            left_s = context.time_remaining() or DRAIN_S
            moved = await self._node.fetcher.push_to(
                landing, layout, targets, request.target_address, left_s, replica=request.replica, move=request.move
            )
        except MoonpoolError as e:
            await abort(context, e)
        return pb.store.PushToReply(bytes=moved.bytes, carrier=moved.carrier)

    async def Endpoint(self, request: pb.store.EndpointRequest, context: Any) -> pb.store.EndpointReply:
        try:
            self._layout(request.layout, request.writer or "the writer")
            writer = Life(MemberId(request.writer), Incarnation(request.writer_incarnation)) if request.writer else None
            endpoint = await self._node.receiving.endpoint(request.carriers[:MAX_CARRIERS], writer)
        except MoonpoolError as e:
            return pb.store.EndpointReply(error=to_error(e))
        return to_wire(endpoint, pb.store.EndpointReply())

    async def RemakeEndpoint(self, request: pb.types.Empty, context: Any) -> pb.store.EndpointReply:
        return to_wire(await self._node.remake(), pb.store.EndpointReply())

    # The rest.

    async def Watch(self, request: pb.store.WatchRequest, context: Any) -> AsyncIterator[pb.store.WatchMessage]:
        idle_s = self._node.config.timing.silent_after_ms / 1e3
        async for frame in self._node.watchers.frames(request.incarnation, request.next_number, idle_s):
            yield pb.store.WatchMessage(frame=frame)

    async def Clear(self, request: pb.store.KeysRequest, context: Any) -> pb.store.ClearReply:
        keys = await self._keys(request, context)
        done = self._pool.clear(keys or None)
        self._node.changed()
        return pb.store.ClearReply(cleared=done.cleared, kept=done.kept)

    async def Stats(self, request: pb.types.Empty, context: Any) -> pb.store.StatsReply:
        return pb.store.StatsReply(numbers=self._node.numbers(), words=self._node.words())
