"""The gateway's conductors: ask one, fail over to the next, tell the one that placed how it went.

A conductor has ``timing.place_timeout_ms`` for its first word. Where that is "waiting", the call stays open for as long as
the request lives, under a vigil: a conductor that is lost meanwhile is passed over within two seconds.
One that was passed over is not asked first for a while; the leading one is otherwise, for it alone moves blocks about.
With none reachable a request waits, bounded in number by the gateway's own limit and in time by
``timing.conductor_wait_ms``, and is then refused with NoPath.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from moonpool.cluster.gateway.suspects import Suspects
from moonpool.cluster.gateway.vigil import Vigils
from moonpool.core.breaker import Breaker, Pace
from moonpool.core.config import TimingConfig
from moonpool.core.errors import Bug, DeadlinePassed, Failure, NoPath, Reason
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.core.membership import Member, MemberChange, Peers
from moonpool.core.placement import Finished, Placement, PlaceRequest
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import being_cancelled

RETRY_AFTER_S = 2.0  # said to clients when nobody can place: about how long a restart takes
_ASK_AGAIN_S = 0.2  # between rounds over all conductors, unless membership changes first
_FINISHED_TIMEOUT_S = 2.0
_FINISHED_LIMIT = 1_024  # reports under way; more are dropped: bookings are rebuilt from workers' reports anyway
_PACE = Pace(failures=1, first_s=1.0, longest_s=10.0, probe_s=5.0)  # of conductors that are passed over
_WORKERS = (Role.PREFILL, Role.DECODE, Role.BOTH)
_DOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Conductors:
    def __init__(self, peers: Peers, timing: TimingConfig) -> None:
        self._peers = peers
        self._timing = timing
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._now = asyncio.get_running_loop().time
        self._preferred = ""  # the address that answered last
        self._breakers: dict[tuple[MemberId, Incarnation], Breaker] = {}
        self._suspects = Suspects()
        self._vigils = Vigils(self._stub, timing.place_timeout_ms / 1000)
        self._unsubscribe = peers.subscribe(self._on_change)
        self.waiting = 0  # requests asking or waiting for a conductor
        self.passed_over = 0  # times that a conductor said nothing in time, or was lost

    @property
    def queued(self) -> int:
        """Requests that wait in a conductor's queue."""
        return self._vigils.waiting

    @property
    def avoided(self) -> int:
        """Workers that are left out of placements, because they keep failing."""
        return self._suspects.count(self._now())

    def ended(self, placement: Placement, reason: Reason | None, peer: str) -> None:
        """How an attempt ended: ``reason`` why it failed, ``peer`` who failed it, where that is known; None: it answered."""
        self._suspects.ended(placement, reason, peer, self._now(), random.random())

    def _on_change(self, change: MemberChange) -> None:
        self._suspects.heard(change)
        if change.member.role is Role.CONDUCTOR:
            self._changed.set()
            self._vigils.on_change(change)

    async def place(self, request: PlaceRequest, *, deadline: float) -> tuple[Placement, str]:
        """The placement and the address of who gave it. ``deadline`` is in seconds of the event loop's clock.

        Raises what the conductor refuses with, NoPath where none answers in time, DeadlinePassed where the request still
        waits for a worker when its time is over.
        """
        asked: set[str] = set()
        self.waiting += 1
        try:
            placement, conductor = await self._place_elsewhere(request, asked, deadline)
            self._suspects.placed(placement, self._now())
            return placement, conductor
        except asyncio.CancelledError:
            for address in asked:  # it may have booked what nobody will use
                self.tell(address, Finished(request.request, request.attempt, booking=0, outcome=Reason.CANCELLED))
            raise
        finally:
            self.waiting -= 1

    async def _place_elsewhere(self, request: PlaceRequest, asked: set[str], deadline: float) -> tuple[Placement, str]:
        """Without workers that keep failing, if it can be done without."""
        live = [member for role in _WORKERS for member in self._peers.live(role)]
        avoid = [worker for worker in self._suspects.avoid(live, self._now()) if worker not in request.exclude]
        if avoid:
            fewer = replace(request, exclude=(*request.exclude, *avoid))
            try:
                return await self._place(to_wire(fewer, pb.conductor.PlaceRequest()), asked, deadline)
            except NoPath:
                if not any(self._in_order()):
                    raise
        return await self._place(to_wire(request, pb.conductor.PlaceRequest()), asked, deadline)

    async def _place(self, message: pb.conductor.PlaceRequest, asked: set[str], deadline: float) -> tuple[Placement, str]:
        loop = asyncio.get_running_loop()
        wait_s = self._timing.conductor_wait_ms / 1000
        give_up = min(deadline, loop.time() + wait_s)
        while True:
            self._changed.clear()
            for member in self._in_order():
                asked.add(member.address)
                question = _Question(self._stub(member.address), message, deadline)
                first_s = min(give_up - loop.time(), self._timing.place_timeout_ms / 1000)
                breaker = self._breakers.setdefault((member.id, member.incarnation), Breaker(_PACE))
                breaker.begin(self._now())
                reply = await self._answer(member, question, first_s)
                if reply is not None:
                    breaker.succeeded(self._now())
                    self._preferred = member.address
                    return _placement(reply), member.address
                if self._now() >= deadline:  # the call ended with the request: that says nothing about the conductor
                    breaker.given_up(self._now())
                    break
                self.passed_over += 1
                breaker.failed(self._now(), random.random())
                if question.waited:  # it was answered until now: what is left of its patience starts anew
                    give_up = min(deadline, loop.time() + wait_s)
            left = give_up - loop.time()
            if loop.time() >= deadline:
                raise DeadlinePassed("request: its time was over before a conductor answered; try again later")
            if left <= 0:
                raise NoPath(
                    f"conductor: none answered within {self._timing.conductor_wait_ms} ms; start one, or try again later",
                    retry_after_s=RETRY_AFTER_S,
                )
            await self._wait_for_change(min(left, _ASK_AGAIN_S))

    def _in_order(self) -> list[Member]:
        live, now = [m for m in self._peers.live(Role.CONDUCTOR) if m.ready], self._now()

        def rank(member: Member) -> tuple[bool, int, bool]:
            breaker = self._breakers.get((member.id, member.incarnation))
            passed_over = breaker is not None and not breaker.allows(now)
            return passed_over, -member.term, member.address != self._preferred

        return sorted(live, key=rank)

    async def _answer(self, member: Member, question: _Question, first_s: float) -> pb.conductor.PlaceReply | None:
        """None: it is down, or lost while the request waited there; try the next one."""
        try:
            reply = await question.first(first_s)
            if reply is not None and reply.WhichOneof("kind") == "waiting":
                with self._vigils.over(member) as lost:
                    reply = await question.later(lost)
        except grpc.aio.AioRpcError as e:
            if e.code() in _DOWN:
                return None
            raise Bug(f"conductor {member.id}: {e.code().name.lower()}: {e.details()}") from e
        finally:
            question.end()
        return reply

    async def _wait_for_change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _stub(self, address: str) -> Any:
        return pb.conductor_rpc.ConductorStub(self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            self._forget_old()
            channel = self._channels[address] = dial(address)
        return channel

    def _forget_old(self) -> None:
        lives = {(m.id, m.incarnation) for m in self._peers.live(Role.CONDUCTOR)}
        self._breakers = {life: breaker for life, breaker in self._breakers.items() if life in lives}
        live = {m.address for m in self._peers.live(Role.CONDUCTOR)}
        for address in self._channels.keys() - live:
            self._spawn(_close(self._channels.pop(address)))

    def tell(self, address: str, finished: Finished) -> None:
        """Report how an attempt went; nobody waits for it and a lost report costs nothing but a calibration."""
        if len(self._tasks) < _FINISHED_LIMIT:
            self._spawn(self._tell(address, to_wire(finished, pb.conductor.FinishedRequest())))

    async def _tell(self, address: str, message: pb.conductor.FinishedRequest) -> None:
        try:
            await self._stub(address).Finished(message, timeout=_FINISHED_TIMEOUT_S)
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


class _Question:
    """One open ``Place`` call."""

    def __init__(self, stub: Any, message: pb.conductor.PlaceRequest, deadline: float) -> None:
        self._deadline = deadline
        self._now = asyncio.get_running_loop().time
        self._call = stub.Place(message, timeout=max(deadline - self._now(), 0.001))
        self.waited = False

    async def first(self, seconds: float) -> pb.conductor.PlaceReply | None:
        """Its first word; None where it says nothing for ``seconds``. AioRpcError where the call breaks."""
        try:
            async with asyncio.timeout(max(seconds, 0.001)):
                return await self._read()
        except TimeoutError:
            return None

    async def later(self, lost: asyncio.Event) -> pb.conductor.PlaceReply | None:
        """The answer that was announced; None once the conductor is ``lost``. DeadlinePassed at the request's end."""
        self.waited = True
        reading, losing = asyncio.ensure_future(self._read()), asyncio.ensure_future(lost.wait())
        try:
            left = max(self._deadline - self._now(), 0.0)
            await asyncio.wait({reading, losing}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and (self._now() < self._deadline or reading.exception() is None):
                return reading.result()
            if losing.done():
                return None
            raise DeadlinePassed("request: its time was over before a worker was free for it; try again later")
        finally:
            for task in (reading, losing):
                task.cancel()
            await asyncio.gather(reading, losing, return_exceptions=True)

    async def _read(self) -> pb.conductor.PlaceReply | None:
        """After the answer the end of the call is read, too: cancelling it earlier would take the answer back."""
        try:
            reply = await self._call.read()
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            return None  # the channel was closed under the call: that conductor is no member any more
        if reply is grpc.aio.EOF:
            await self._call.code()
            return None
        answer: pb.conductor.PlaceReply = reply
        if answer.WhichOneof("kind") != "waiting":
            await self._call.code()
        return answer

    def end(self) -> None:
        """A no-op once it was answered."""
        self._call.cancel()


async def _close(channel: grpc.aio.Channel) -> None:
    await channel.close()


def _placement(reply: pb.conductor.PlaceReply) -> Placement:
    if reply.WhichOneof("kind") == "refusal":
        raise from_wire(reply.refusal, Failure).to_exception()
    return from_wire(reply.placement, Placement)
