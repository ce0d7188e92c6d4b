"""The conductor's process: its gRPC face, and the messages that keep the pure ``scheduler.Conductor`` informed.

Everything runs on one event loop and nothing in it waits while it decides. State is soft: a conductor that starts anew
takes membership from its peers, blocks from the store nodes' snapshots and load from the workers' reports.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import Any, NoReturn

import grpc

from moonpool.cluster.deciding import conductor_of
from moonpool.cluster.late_answers import LateAnswers
from moonpool.cluster.leadership import Alone, Leads
from moonpool.cluster.moves import Moves
from moonpool.cluster.record_file import VERSION, Head, lines
from moonpool.cluster.role_moves import RoleMoves
from moonpool.cluster.store_watches import StoreWatches
from moonpool.core.blocks import KEY_BYTES
from moonpool.core.config import Config
from moonpool.core.errors import Bug, InvalidRequest, NoPath, Reason
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.lifetime import Instant, Lifetime, Lives
from moonpool.core.membership import Member, MemberChange, Peers, WorkerReport
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.scheduler.actions import Action, Bound, Cool, Prefetch, Replicate, Resync, SwitchRole
from moonpool.scheduler.conductor import Event
from moonpool.scheduler.recording import Recording, answered
from moonpool.wire import frames, pb
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.guard import require_own_name

Done = Finished  # within the service that name is a call
Clock = Callable[[], float]
QUIET_PERIODS = 5  # of ``silent_after_ms``: a store node's stream that says nothing for longer is broken
LINES_AT_ONCE = 64  # of a record, in one message
LAST_WORDS_S = 0.2  # for those who waited, or still come, to be told
SOONEST_S = 0.001  # until the conductor is asked again what is due: it may want to be asked at once, again and again


class ConductorService(pb.conductor_rpc.ConductorServicer):
    """Implements ``core.membership.Service``. Event-loop only."""

    def __init__(
        self, config: Config, member: Member, peers: Peers, clock: Clock = time.monotonic, *, leads: Leads | None = None
    ) -> None:
        """``leads``: who tells whether it leads; without, it is the only one."""
        self.conductor = conductor_of(config)
        self._member = member
        self._clock = clock
        self._late = LateAnswers()
        self.lifetimes = Lives()
        self._leads: Leads = leads or Alone()
        self._moves = Moves(peers, config.scheduler.moves_at_once, self._leads)
        self._roles = RoleMoves(peers, member.id, self._leads)
        self._leaving = False
        self._timer: asyncio.TimerHandle | None = None
        self._booking_s = config.timing.request_budget_ms / 1e3
        self.recording = Recording(config.scheduler.record_limit)
        self._watches = StoreWatches(self._heard, self._wanted, QUIET_PERIODS * config.timing.silent_after_ms / 1e3)
        self._unsubscribe = peers.subscribe(self._on_change)

    @classmethod
    async def start(cls, config: Config, member: Member, peers: Peers, leads: Leads | None = None) -> ConductorService:
        return cls(config, member, peers, leads=leads)

    def add_to(self, server: grpc.aio.Server) -> None:
        pb.conductor_rpc.add_ConductorServicer_to_server(self, server)

    async def drain(self, limit_s: float) -> None:
        """Place nothing more: who waits here, or comes still, is told to ask another conductor."""
        self._leaving = True
        self._late.end_all()
        await asyncio.sleep(min(limit_s, LAST_WORDS_S))

    async def close(self) -> None:
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
        self._late.end_all()
        await self._leads.close()
        await self._moves.close()
        await self._roles.close()
        await self._watches.close()

    def report(self) -> WorkerReport | None:
        return None

    def numbers(self) -> dict[str, float]:
        watches = self._watches
        return {
            **self.conductor.numbers(self._clock()),
            **self._moves.numbers(),
            "role_switches": float(self._roles.switches),
            "leading_term": float(self._leads.term()),
            "answers_unclaimed": float(self._late.unclaimed),
            "store_watches_connected": float(watches.connected),
            "store_watch_reconnects": float(watches.reconnects),
            "store_watch_bad_frames": float(watches.bad_frames),
        }

    def words(self) -> dict[str, str]:
        names = {"policy": self.conductor.policy.name, "admission": self.conductor.admission.name}
        return names | ({"leader": leader} if (leader := self._leads.leader()) else {})

    # what it hears

    def _on_change(self, change: MemberChange) -> None:
        self._observe(change)
        self._watches.on_change(change)  # after the conductor, which heeds only blocks of nodes it knows

    def _heard(self, event: EventBatch | IndexSnapshot) -> bool:
        return self._observe(event)

    def _wanted(self, node: NodeId, incarnation: Incarnation) -> int:
        return self.conductor.next_number(node, incarnation)

    def _observe(self, event: Event) -> bool:
        """Whether events are missing before this one."""
        now = self._clock()
        self.recording.add(now, event)
        return self._act(self.conductor.observe(event, now))

    # what it does

    def _act(self, actions: Iterable[Action]) -> bool:
        """Carry out ``actions``, and be called again when the conductor wants to be. True: one of them is a resync."""
        resync = False
        for action in actions:
            match action:
                case Bound():
                    if self._late.bound(action):
                        self.recording.add(self._clock(), answered(action.request, action.attempt, action.answer))
                    else:
                        self.conductor.withdraw(action.request, self._clock())
                case Resync():
                    resync = True
                case Replicate() | Prefetch() | Cool():
                    self._moves.take(action)
                case SwitchRole():
                    assert self.conductor.planner is not None  # nobody else wishes for one
                    self._roles.take(action, self.conductor.planner)
        self._arm()
        return resync

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.conductor.next_at()
        if at is not None and at < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(at - self._clock(), SOONEST_S), self._due)

    def _due(self) -> None:
        self._timer = None
        self._act(self.conductor.due(self._clock()))

    # gRPC

    async def Place(  # type: ignore[override]  # it writes, and so hears at once when its caller leaves
        self, request: pb.conductor.PlaceRequest, context: grpc.aio.ServicerContext
    ) -> None:
        try:
            asked = _checked(from_wire(request, PlaceRequest))
        except InvalidRequest as e:
            await _refuse(context, e)
        if self._leaving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "conductor: leaving")
        life = Lifetime({Instant.ARRIVED: self._clock()}, {"tenant": asked.tenant})
        try:
            await self._decide(asked, life, context)
        finally:
            if len(life.at) == 1:
                life.stamp(Instant.CANCELLED, self._clock())
            self.lifetimes.add(asked.request, asked.attempt, life)

    async def _decide(self, asked: PlaceRequest, life: Lifetime, context: grpc.aio.ServicerContext) -> None:
        now = self._clock()
        self.recording.add(now, asked)
        answer = self.conductor.place(asked, now)
        if not isinstance(answer, Later):
            self.recording.add(now, answered(asked.request, asked.attempt, answer))
            self._act(self.conductor.take_actions())
            await self._answer(asked, answer, life, context)
            return
        coming = self._late.open(asked.request, asked.attempt)  # before any action is taken: it may be the answer
        heard = False
        self._act(self.conductor.take_actions())
        try:
            reply = pb.conductor.PlaceReply()
            reply.waiting.predicted_ttft_ms = answer.predicted_ttft_ms
            await context.write(reply)
            bound = await coming
            heard = True
        except NoPath as e:
            await context.abort(grpc.StatusCode.UNAVAILABLE, e.message)
        finally:
            if self._late.close(asked.request, coming) and not heard:  # also where it was booked as its caller left
                self.conductor.withdraw(asked.request, self._clock())
        await self._answer(asked, bound, life, context)

    async def _answer(
        self, asked: PlaceRequest, answer: Placement | Refusal, life: Lifetime, context: grpc.aio.ServicerContext
    ) -> None:
        reply = pb.conductor.PlaceReply()
        if isinstance(answer, Placement):
            to_wire(answer, reply.placement)
            life.stamp(Instant.PLACED, self._clock())
            life.facts |= {"prefill": answer.prefill.id, "decode": answer.decode.id, "outcome": "ok"}
        else:
            to_wire(answer, reply.refusal)
            life.stamp(Instant.REFUSED, self._clock())
            life.facts["outcome"] = answer.reason.value
        try:
            await context.write(reply)
        except asyncio.CancelledError:
            if isinstance(answer, Placement):  # the caller has left: nobody will use it, nor say so
                self._over(Finished(asked.request, asked.attempt, answer.booking, outcome=Reason.CANCELLED))
            raise

    async def Finished(self, request: pb.conductor.FinishedRequest, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        self._over(from_wire(request, Finished))
        return pb.types.Empty()

    def _over(self, done: Done) -> None:
        now = self._clock()
        self.recording.add(now, done)
        self._act(self.conductor.finished(done, now))

    async def Alive(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        return pb.types.Empty()

    async def Report(self, request: pb.types.WorkerReport, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        await require_own_name(context, request.worker)
        try:
            report = from_wire(request, WorkerReport)
            events = [_device_events(frame, report) for frame in report.g1_frames]
        except InvalidRequest as e:
            await _refuse(context, e)
        for event in (report, *events):
            self._observe(event)
        return pb.types.Empty()

    async def Rebalance(
        self, request: pb.conductor.RebalanceRequest, context: grpc.aio.ServicerContext
    ) -> pb.conductor.RebalanceReply:
        wanted, now = dict(request.switches), self._clock()
        try:
            told = await self._roles.rebalance(self.conductor, apply=request.apply, wanted=wanted, now=now)
        except (InvalidRequest, NoPath) as e:
            await _refuse(context, e)
        return pb.conductor.RebalanceReply(json=json.dumps(told))

    async def Explain(
        self, request: pb.conductor.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> pb.conductor.ExplainReply:
        if not request.request:
            decisions = self.conductor.newest(request.last)
            told: dict[str, Any] | None = {"decisions": decisions} if decisions else None
        else:
            told = self.conductor.explain(request.request)
        if told is None:
            return pb.conductor.ExplainReply(found=False)
        return pb.conductor.ExplainReply(found=True, json=json.dumps({"conductor": self._member.id, **told}))

    async def Record(
        self, request: pb.conductor.RecordRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.conductor.RecordPart]:
        conductor, recording = self.conductor, self.recording
        cut = recording.cut or 0 < request.last < len(recording)
        head = Head(VERSION, self._member.id, conductor.policy.name, conductor.admission.name, self._booking_s, cut)
        left = lines(head, recording.entries(request.last))
        while batch := b"".join(islice(left, LINES_AT_ONCE)):
            yield pb.conductor.RecordPart(lines=batch)  # others have their turn between two


def _checked(request: PlaceRequest) -> PlaceRequest:
    if request.prompt_tokens < 1:
        raise InvalidRequest("prompt_tokens: 0; at least one prompt token is needed", param="prompt_tokens")
    if len(request.keys) > request.prompt_tokens:
        raise InvalidRequest(
            f"keys: {len(request.keys)} for {request.prompt_tokens} prompt tokens; give one per whole block", param="keys"
        )
    if any(len(key) != KEY_BYTES for key in request.keys):
        raise InvalidRequest(f"keys: every block key has {KEY_BYTES} bytes", param="keys")
    return request


def _device_events(frame: bytes, report: WorkerReport) -> EventBatch | IndexSnapshot:
    snapshot = frames.kind_of(frame) is frames.Kind.SNAPSHOT
    event = frames.decode_snapshot(frame) if snapshot else frames.decode_events(frame)
    if event.holder != report.worker:
        raise InvalidRequest(f"g1_frames: events of {event.holder!r} in a report of {report.worker!r}", param="g1_frames")
    return event


async def _refuse(context: grpc.aio.ServicerContext, error: InvalidRequest | NoPath) -> NoReturn:
    await context.abort(grpc.StatusCode[error.grpc_status], error.message)
    raise Bug("abort returned")
