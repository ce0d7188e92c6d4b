"""The conductor's process: its gRPC face, and the messages that keep the pure ``scheduler.Conductor`` informed.

Everything runs on one event loop and nothing in it waits while it decides. State is soft: a conductor that starts anew
takes membership from its peers, blocks from the store nodes' snapshots and load from the workers' reports.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from moonpool.cluster.store_watches import StoreWatches
from moonpool.core.blocks import KEY_BYTES
from moonpool.core.config import Config
from moonpool.core.errors import Bug, InvalidRequest
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.membership import Member, MemberChange, Peers, WorkerReport
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal
from moonpool.scheduler.conductor import Conductor
from moonpool.wire import frames, pb
from moonpool.wire.convert import from_wire, to_wire

Clock = Callable[[], float]
QUIET_PERIODS = 5  # of ``silent_after_ms``: a store node's stream that says nothing for longer is broken


class ConductorService(pb.conductor_rpc.ConductorServicer):
    """Implements ``core.membership.Service``. Event-loop only."""

    def __init__(self, config: Config, member: Member, peers: Peers, clock: Clock = time.monotonic) -> None:
        self.conductor = Conductor(booking_s=config.timing.request_budget_ms / 1e3)
        self._member = member
        self._clock = clock
        self._watches = StoreWatches(self._heard, self._wanted, QUIET_PERIODS * config.timing.silent_after_ms / 1e3)
        self._unsubscribe = peers.subscribe(self._on_change)

    @classmethod
    async def start(cls, config: Config, member: Member, peers: Peers) -> ConductorService:
        return cls(config, member, peers)

    def add_to(self, server: grpc.aio.Server) -> None:
        pb.conductor_rpc.add_ConductorServicer_to_server(self, server)

    async def close(self) -> None:
        self._unsubscribe()
        await self._watches.close()

    def report(self) -> WorkerReport | None:
        return None

    def numbers(self) -> dict[str, float]:
        watches = self._watches
        return {
            **self.conductor.numbers(self._clock()),
            "store_watches_connected": float(watches.connected),
            "store_watch_reconnects": float(watches.reconnects),
            "store_watch_bad_frames": float(watches.bad_frames),
        }

    def words(self) -> dict[str, str]:
        return {"policy": "smallest predicted TTFT"}

    # what it hears

    def _on_change(self, change: MemberChange) -> None:
        self.conductor.observe(change, self._clock())
        self._watches.on_change(change)  # after the conductor, which heeds only blocks of nodes it knows

    def _heard(self, event: EventBatch | IndexSnapshot) -> bool:
        return bool(self.conductor.observe(event, self._clock()))

    def _wanted(self, node: NodeId, incarnation: Incarnation) -> int:
        return self.conductor.next_number(node, incarnation)

    # gRPC

    async def Place(self, request: pb.conductor.PlaceRequest, context: grpc.aio.ServicerContext) -> pb.conductor.PlaceReply:
        try:
            asked = _checked(from_wire(request, PlaceRequest))
        except InvalidRequest as e:
            await _refuse(context, e)
        answer = self.conductor.place(asked, self._clock())
        reply = pb.conductor.PlaceReply()
        if isinstance(answer, Placement):
            to_wire(answer, reply.placement)
        elif isinstance(answer, Refusal):
            to_wire(answer, reply.refusal)
        return reply

    async def Finished(self, request: pb.conductor.FinishedRequest, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        self.conductor.finished(from_wire(request, Finished), self._clock())
        return pb.types.Empty()

    async def Report(self, request: pb.types.WorkerReport, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        now = self._clock()
        try:
            report = from_wire(request, WorkerReport)
            events = [_device_events(frame, report) for frame in report.g1_frames]
        except InvalidRequest as e:
            await _refuse(context, e)
        self.conductor.observe(report, now)
        for event in events:
            self.conductor.observe(event, now)
        return pb.types.Empty()

    async def Explain(
        self, request: pb.conductor.ExplainRequest, context: grpc.aio.ServicerContext
    ) -> pb.conductor.ExplainReply:
        told: dict[str, Any] | None = self.conductor.explain(request.request)
        if told is None:
            return pb.conductor.ExplainReply(found=False)
        return pb.conductor.ExplainReply(found=True, json=json.dumps({"conductor": self._member.id, **told}))


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


async def _refuse(context: grpc.aio.ServicerContext, error: InvalidRequest) -> NoReturn:
    await context.abort(grpc.StatusCode[error.grpc_status], error.message)
    raise Bug("abort returned")
