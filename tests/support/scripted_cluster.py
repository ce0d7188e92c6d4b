"""Real gRPC servers that do what a test says: a conductor and decode workers, and the membership that names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.placement import Finished, Placement, PlaceRequest, WorkerRef
from moonpool.core.request import Attempt, Emission, FinishReason, Sampled
from moonpool.wire import channels, pb
from moonpool.wire.convert import from_wire, to_wire

LAYOUT = KVLayout(model="tiny", layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)


class Membership:
    """Peers whose changes a test makes by hand."""

    def __init__(self) -> None:
        self._known: dict[MemberId, MemberChange] = {}
        self._listeners: list[Callable[[MemberChange], None]] = []

    def say(self, member: Member, liveness: Liveness = Liveness.LIVE, proof: str = "") -> None:
        change = self._known[member.id] = MemberChange(member, liveness, proof)
        for listener in list(self._listeners):
            listener(change)

    def get(self, member: MemberId) -> MemberChange | None:
        return self._known.get(member)

    def live(self, role: Role) -> list[Member]:
        found = [c.member for c in self._known.values() if c.liveness is Liveness.LIVE and c.member.role is role]
        return sorted(found, key=lambda m: m.id)

    def store_of(self, node: NodeId) -> Member | None:
        return next((m for m in self.live(Role.STORE) if m.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        self._listeners.append(on_change)
        for change in list(self._known.values()):
            on_change(change)
        return lambda: self._listeners.remove(on_change)


@dataclass
class Job:
    """One attempt at a scripted decode worker. ``say`` sends one emission; ``cancelled`` is set by the gateway's cancel."""

    attempt: Attempt
    placement: Placement
    send: Callable[[Emission], Awaitable[None]]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def emit(self, **values: Any) -> None:
        emission = Emission(self.attempt.request.id, self.attempt.number, 0)
        await self.send(replace(emission, **values))

    async def say(
        self, tokens: Sequence[int], *, finish: FinishReason | None = None, cached: int = 0, position: int | None = None
    ) -> None:
        """The ids at the next positions; ``finish`` goes with the last one."""
        start = len(self.attempt.emitted) if position is None else position
        for i, token in enumerate(tokens):
            last = finish if i == len(tokens) - 1 else None
            await self.emit(position=start + i, sampled=Sampled(token), finish=last, cached_tokens=0 if i else cached)

    async def fail(self, reason: Reason, message: str = "as scripted", peer: str = "") -> None:
        await self.emit(error=Failure(reason, message, peer))


Script = Callable[[Job], Awaitable[None]]


class ScriptedDecode(pb.decode_rpc.DecodeServicer):
    """Runs ``script`` for every attempt; keeps what it was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.started: list[Attempt] = []  # with their siblings, which are jobs, too
        self.arrived: asyncio.Queue[Job] = asyncio.Queue()
        self.streams = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def Tokens(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.decode.Step]:
        self.streams += 1
        steps: asyncio.Queue[pb.decode.Step] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, steps))
        try:
            while True:
                yield await steps.get()
        finally:
            reader.cancel()
            for task in self._tasks:
                task.cancel()

    async def _read(self, messages: AsyncIterator[pb.decode.GatewayMessage], steps: asyncio.Queue[pb.decode.Step]) -> None:
        async def send(emission: Emission) -> None:
            await steps.put(pb.decode.Step(emissions=[to_wire(emission, pb.decode.Emission())]))

        async for message in messages:
            if message.WhichOneof("kind") == "start":
                lead, placement = from_wire(message.start.attempt, Attempt), from_wire(message.start.placement, Placement)
                self.started.append(lead)
                for attempt in (lead, *(lead.of(sibling) for sibling in lead.siblings)):
                    job = Job(attempt, placement, send)
                    self.jobs.append(job)
                    await self.arrived.put(job)
                    task = asyncio.create_task(self.script(job))  # type: ignore[arg-type]
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            else:
                for job in self.jobs:
                    if (job.attempt.request.id, job.attempt.number) == (message.cancel.request, message.cancel.attempt):
                        job.cancelled.set()


class ScriptedConductor(pb.conductor_rpc.ConductorServicer):
    """Answers with ``decide(request)``: a placement, a failure, None to never answer, or an event to wait for first."""

    def __init__(self, decide: Callable[[PlaceRequest], Placement | Failure | asyncio.Event | None]) -> None:
        self.decide = decide
        self.placed: list[PlaceRequest] = []
        self.finished: asyncio.Queue[Finished] = asyncio.Queue()
        self.taken_back: asyncio.Queue[str] = asyncio.Queue()  # requests whose callers left while they waited
        self.alive = asyncio.Event()  # cleared, it answers no question whether it is alive
        self.alive.set()
        self.asked_alive = 0

    async def Place(self, request: Any, context: Any) -> None:
        asked = from_wire(request, PlaceRequest)
        self.placed.append(asked)
        answer = self.decide(asked)
        if answer is None:
            await asyncio.Event().wait()
        while isinstance(answer, asyncio.Event):
            await context.write(pb.conductor.PlaceReply(waiting=pb.conductor.PlaceWaiting()))
            try:
                await answer.wait()
            except asyncio.CancelledError:
                self.taken_back.put_nowait(asked.request)
                raise
            answer = self.decide(asked)
        if isinstance(answer, Failure):
            await context.write(pb.conductor.PlaceReply(refusal=to_wire(answer, pb.types.Error())))
        else:
            assert answer is not None
            await context.write(pb.conductor.PlaceReply(placement=to_wire(answer, pb.types.Placement())))

    async def Alive(self, request: Any, context: Any) -> pb.types.Empty:
        self.asked_alive += 1
        await self.alive.wait()
        return pb.types.Empty()

    async def Finished(self, request: Any, context: Any) -> pb.types.Empty:
        await self.finished.put(from_wire(request, Finished))
        return pb.types.Empty()

    async def Report(self, request: Any, context: Any) -> pb.types.Empty:
        return pb.types.Empty()

    async def Explain(self, request: Any, context: Any) -> pb.conductor.ExplainReply:
        return pb.conductor.ExplainReply()


@dataclass
class Served:
    """A running server and how membership names it."""

    server: grpc.aio.Server
    member: Member

    @property
    def ref(self) -> WorkerRef:
        m = self.member
        return WorkerRef(m.id, m.incarnation, m.node, m.address)

    async def kill(self) -> None:
        await self.server.stop(0)


async def serve(
    role: Role, service: Any, *, name: str | None = None, life: int = 1, max_prompt: int = 0, max_context: int = 0
) -> Served:
    server = channels.server()
    if role is Role.CONDUCTOR:
        pb.conductor_rpc.add_ConductorServicer_to_server(service, server)
    else:
        pb.decode_rpc.add_DecodeServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    member = Member(
        id=MemberId(name or f"{role}-0"),
        role=role,
        node=NodeId("b"),
        incarnation=Incarnation(life),
        address=f"127.0.0.1:{port}",
        pid=0,
        layout=None if role is Role.CONDUCTOR else LAYOUT,
        max_prompt=max_prompt,
        max_context=max_context,
    )
    return Served(server, member)


def store_member(node: str = "b") -> Member:
    """The store node of the decode workers' node, as membership knows it."""
    return Member(MemberId(f"store-{node}"), Role.STORE, NodeId(node), Incarnation(1), "127.0.0.1:1", 0, layout=LAYOUT)


def prefill_member(*, name: str = "prefill-0", max_prompt: int = 0) -> Member:
    """A prefill worker that only membership knows: gateways never talk to one."""
    return Member(
        MemberId(name), Role.PREFILL, NodeId("a"), Incarnation(1), "127.0.0.1:1", 0, layout=LAYOUT, max_prompt=max_prompt
    )
