"""The gateway's conductors: ask one, fail over to the next, tell the one that placed how it went.

With none reachable a request waits, bounded in number by the gateway's own limit and in time by
``timing.conductor_wait_ms``, and is then refused with NoPath.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio

from moonpool.core.config import TimingConfig
from moonpool.core.errors import Bug, Failure, NoPath, Reason
from moonpool.core.ids import Role
from moonpool.core.membership import Member, MemberChange, Peers
from moonpool.core.placement import Finished, Placement, PlaceRequest
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire

RETRY_AFTER_S = 2.0  # said to clients when nobody can place: about how long a restart takes
_ASK_AGAIN_S = 0.2  # between rounds over all conductors, unless membership changes first
_FINISHED_TIMEOUT_S = 2.0
_FINISHED_LIMIT = 1_024  # reports under way; more are dropped: bookings are rebuilt from workers' reports anyway
_DOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Conductors:
    def __init__(self, peers: Peers, timing: TimingConfig) -> None:
        self._peers = peers
        self._timing = timing
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._preferred = ""  # the address that answered last
        self._unsubscribe = peers.subscribe(self._on_change)
        self.waiting = 0  # requests asking or waiting for a conductor

    def _on_change(self, change: MemberChange) -> None:
        if change.member.role is Role.CONDUCTOR:
            self._changed.set()

    async def place(self, request: PlaceRequest, *, deadline: float) -> tuple[Placement, str]:
        """The placement and the address of who gave it. ``deadline`` is in seconds of the event loop's clock.

        Raises what the conductor refuses with, NoPath where none answers in time.
        """
        loop = asyncio.get_running_loop()
        give_up = min(deadline, loop.time() + self._timing.conductor_wait_ms / 1000)
        message = to_wire(request, pb.conductor.PlaceRequest())
        asked: set[str] = set()
        self.waiting += 1
        try:
            while True:
                self._changed.clear()
                for member in self._in_order():
                    asked.add(member.address)
                    left = give_up - loop.time()
                    reply = await self._ask(member, message, min(left, self._timing.place_timeout_ms / 1000))
                    if reply is not None:
                        self._preferred = member.address
                        return _placement(reply), member.address
                left = give_up - loop.time()
                if left <= 0:
                    raise NoPath(
                        f"conductor: none answered within {self._timing.conductor_wait_ms} ms; start one, or try again later",
                        retry_after_s=RETRY_AFTER_S,
                    )
                await self._wait_for_change(min(left, _ASK_AGAIN_S))
        except asyncio.CancelledError:
            for address in asked:  # it may have booked what nobody will use
                self.tell(address, Finished(request.request, request.attempt, booking=0, outcome=Reason.CANCELLED))
            raise
        finally:
            self.waiting -= 1

    def _in_order(self) -> list[Member]:
        live = [m for m in self._peers.live(Role.CONDUCTOR) if m.ready]
        return sorted(live, key=lambda m: m.address != self._preferred)

    async def _ask(self, member: Member, message: pb.conductor.PlaceRequest, timeout: float) -> pb.conductor.PlaceReply | None:
        """None: it is down, try the next one."""
        stub = pb.conductor_rpc.ConductorStub(self._channel(member.address))
        try:
            reply: pb.conductor.PlaceReply = await stub.Place(message, timeout=max(timeout, 0.001))
        except grpc.aio.AioRpcError as e:
            if e.code() in _DOWN:
                return None
            raise Bug(f"conductor {member.id}: {e.code().name.lower()}: {e.details()}") from e
        return reply

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            self._forget_old()
            channel = self._channels[address] = grpc.aio.insecure_channel(address)
        return channel

    def _forget_old(self) -> None:
        live = {m.address for m in self._peers.live(Role.CONDUCTOR)}
        for address in self._channels.keys() - live:
            self._spawn(_close(self._channels.pop(address)))

    def tell(self, address: str, finished: Finished) -> None:
        """Report how an attempt went; nobody waits for it and a lost report costs nothing but a calibration."""
        if len(self._tasks) < _FINISHED_LIMIT:
            self._spawn(self._tell(address, to_wire(finished, pb.conductor.FinishedRequest())))

    async def _tell(self, address: str, message: pb.conductor.FinishedRequest) -> None:
        try:
            await pb.conductor_rpc.ConductorStub(self._channel(address)).Finished(message, timeout=_FINISHED_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            pass

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Reports under way get their time-out to arrive."""
        self._unsubscribe()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()


async def _close(channel: grpc.aio.Channel) -> None:
    await channel.close()


def _placement(reply: pb.conductor.PlaceReply) -> Placement:
    if reply.WhichOneof("kind") == "refusal":
        raise from_wire(reply.refusal, Failure).to_exception()
    return from_wire(reply.placement, Placement)
