"""The embedded registry: membership over gRPC, living in the launcher's supervisor (or alone: ``moonpool run registry``).

State is soft: a registry that comes back empty is filled again by the members' own sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc

from moonpool.cluster.election import NOBODY, Election
from moonpool.cluster.election import Lead as Leading  # within the service that name is a call
from moonpool.cluster.roster import Fenced, Roster
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError, LayoutMismatch, MoonpoolError
from moonpool.core.ids import Incarnation, MemberId, Role, checked_name
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import channels, pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.guard import require_own_name, require_own_role
from moonpool.wire.rights import alike

LEASE = 2  # of leadership, in ``silent_after_ms``
WATCH_QUEUE = 1024  # a watcher further behind than this is cut off; it comes back and begins with everybody known


class Registry(pb.registry_rpc.RegistryServicer):
    """Runs on one event loop. ``roster`` may be read there; changes go through the methods of this class."""

    def __init__(self, timing: TimingConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sweep_s = timing.heartbeat_ms / 1000 / 2
        self.roster = Roster(timing.silent_after_ms / 1000)
        self._lease_s, self._began = LEASE * timing.silent_after_ms / 1000, clock()
        self._elections: dict[str, Election] = {}  # by model: each group has a leader of its own
        self._watchers: set[asyncio.Queue[MemberChange | None]] = set()
        self._sessions: dict[MemberId, asyncio.Queue[Fenced | None]] = {}  # where to say `fenced`
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, host: str, port: int = 0) -> str:
        """Serves on ``host``; returns the address. ConfigError when the port is taken."""
        server = channels.server()
        pb.registry_rpc.add_RegistryServicer_to_server(self, server)
        try:
            bound = channels.bind(server, f"{host}:{port}")
        except RuntimeError as e:
            raise ConfigError(
                f"cluster.registry: cannot listen on {host}:{port}; stop what uses it or choose another",
                param="cluster.registry",
            ) from e
        await server.start()
        self._server, self.address = server, f"{host}:{bound}"
        self._sweeper = asyncio.create_task(self._sweep(), name="registry-sweep")
        return self.address

    async def close(self) -> None:
        if self._sweeper:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        for watcher in self._watchers:
            _offer(watcher, None)
        if self._server:
            await self._server.stop(grace=0.2)

    def subscribe(self) -> asyncio.Queue[MemberChange | None]:
        """Everybody known, then changes; None: cut off (too far behind, or the registry ends). End with ``unsubscribe``."""
        queue: asyncio.Queue[MemberChange | None] = asyncio.Queue(WATCH_QUEUE)
        for change in self.roster.snapshot():
            queue.put_nowait(change)
        self._watchers.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[MemberChange | None]) -> None:
        self._watchers.discard(queue)

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        for election in self._elections.values():
            election.ended(member, incarnation)
        self._tell(self.roster.gone(member, incarnation, proof))

    # gRPC

    async def Join(
        self, request_iterator: AsyncIterator[pb.registry.MemberBeat], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.registry.RegistryMessage]:
        """One member's session. It ends in order after a beat that says `leaving`; otherwise it broke."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("member"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Join: the first message must carry `member`")
            return
        await require_own_name(context, first.member.id)
        await require_own_role(context, first.member.role)
        try:
            member = self._join(first)
        except Fenced as e:
            yield _message(e)
            return
        except MoonpoolError as e:
            await context.abort(grpc.StatusCode[e.grpc_status], e.message)
            return
        fences: asyncio.Queue[Fenced | None] = asyncio.Queue(1)
        self._fence_older(member.id, Fenced(f"{member.id}: a newer life ({member.incarnation}) took the name", replaced=True))
        self._sessions[member.id] = fences
        reader = asyncio.create_task(self._read(member, request_iterator, fences))
        try:
            yield pb.registry.RegistryMessage(welcome=pb.types.Empty())
            fence = await fences.get()
            if fence:
                yield _message(fence)
        finally:
            reader.cancel()
            if self._sessions.get(member.id) is fences:
                del self._sessions[member.id]
                left = self.roster.broken(member.id, member.incarnation, self._clock())
                self._tell(left)  # nothing when it left in order

    def _join(self, beat: pb.registry.MemberBeat) -> Member:
        member = from_wire(beat.member, Member)
        checked_name(member.id, "id")
        checked_name(member.node, "node")
        self._tell(self.roster.join(member, self._clock()))
        return member

    async def _read(
        self, member: Member, beats: AsyncIterator[pb.registry.MemberBeat], fences: asyncio.Queue[Fenced | None]
    ) -> None:
        """Heartbeats until the member leaves, is fenced, or its stream breaks; the last word wakes the session."""
        fence: Fenced | None = None
        try:
            async for beat in beats:
                if beat.leaving:
                    self.report_gone(member.id, member.incarnation, "left")
                elif beat.HasField("member") and beat.member.id != member.id:
                    raise Fenced(f"{member.id}: its session spoke for {beat.member.id}")
                elif beat.HasField("member") and not alike(beat.member.role, member.role):
                    raise Fenced(f"{member.id}: its session turned from {member.role} into {beat.member.role}")
                elif beat.HasField("member"):
                    self._join(beat)
                else:
                    self.roster.beat(member.id, member.incarnation, self._clock())
        except Fenced as e:
            fence = e
        except (ConfigError, LayoutMismatch) as e:
            fence = Fenced(e.message)
        finally:
            _say(fences, fence)  # a stream that broke ends like one that was closed: only `leaving` tells

    async def Watch(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.types.MemberChange]:
        queue = self.subscribe()
        await context.send_initial_metadata(())  # says that somebody answers, also where nobody is known yet
        try:
            while (change := await queue.get()) is not None:
                yield to_wire(change, pb.types.MemberChange())
            await context.abort(grpc.StatusCode.UNAVAILABLE, "watch: cut off; watch again")
        finally:
            self.unsubscribe(queue)

    async def List(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.registry.Members:
        known = (to_wire(change, pb.types.MemberChange()) for change in self.roster.snapshot())
        return pb.registry.Members(members=known)

    async def ReportGone(self, request: pb.registry.GoneReport, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        self.report_gone(MemberId(request.member), Incarnation(request.incarnation), request.proof)
        return pb.types.Empty()

    async def Lead(self, request: pb.registry.LeadRequest, context: grpc.aio.ServicerContext) -> pb.registry.LeadReply:
        await require_own_name(context, request.member)
        said = self._lead(MemberId(request.member), Incarnation(request.incarnation), request.known_term, request.held_term)
        lease_ms = int(1000 * said.lease_s)
        return pb.registry.LeadReply(leader=said.leader or "", incarnation=said.incarnation, term=said.term, lease_ms=lease_ms)

    def _lead(self, member: MemberId, incarnation: Incarnation, known: int, held: int) -> Leading:
        """Only who is live may lead, its own group; the terms of all conductors known there are known."""
        asker = self.roster.get(member)
        if asker is None or asker.liveness is not Liveness.LIVE or asker.member.incarnation != incarnation:
            return NOBODY
        model = asker.member.model
        members = (change.member for change in self.roster.snapshot())
        newest = max(known, *(one.term for one in members if one.role is Role.CONDUCTOR and one.model == model))
        election = self._elections.setdefault(model, Election(self._lease_s, self._began))
        return election.ask(member, incarnation, newest, held, self._clock())

    # changes

    def _fence_older(self, member: MemberId, fence: Fenced) -> None:
        older = self._sessions.get(member)
        if older is not None:
            _say(older, fence)

    def _tell(self, changes: list[MemberChange]) -> None:
        for change in changes:
            for watcher in list(self._watchers):
                _offer(watcher, change)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            self._tell(self.roster.sweep(self._clock()))


def _message(fence: Fenced) -> pb.registry.RegistryMessage:
    return pb.registry.RegistryMessage(fenced=str(fence), replaced=fence.replaced)


def _say(fences: asyncio.Queue[Fenced | None], fence: Fenced | None) -> None:
    if fences.empty():
        fences.put_nowait(fence)


def _offer(queue: asyncio.Queue[MemberChange | None], change: MemberChange | None) -> None:
    """Never waits: one who does not read is cut off (its newest entries give way to None) and has to watch again."""
    if change is None or queue.qsize() >= queue.maxsize - 1:
        while queue.qsize() >= queue.maxsize:
            queue.get_nowait()
        queue.put_nowait(None)
    else:
        queue.put_nowait(change)
