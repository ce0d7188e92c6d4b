"""The gateway's side of the token streams: one multiplexed stream to each life of each decode worker.

A broken stream, or a worker that membership calls silent or gone, fails every attempt on it at once with PeerSilent;
the next attempt placed there opens a new stream. An attempt's queue is bounded by its own ``max_tokens``, so that a client
that reads slowly holds up nobody else: a worker sends one emission for each id, and one that sends more loses the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import grpc.aio
import structlog

from moonpool.core.errors import Failure, MoonpoolError, PeerSilent, Reason
from moonpool.core.ids import Incarnation, MemberId, RequestId
from moonpool.core.membership import Liveness, MemberChange, Peers
from moonpool.core.placement import Placement, WorkerRef
from moonpool.core.request import Attempt, Emission
from moonpool.wire import pb
from moonpool.wire.channels import MAX_MESSAGE_BYTES, dial
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import why_unreachable

_log = structlog.get_logger()

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a new life behind an old address gets a new connection
)
_OUT_LIMIT = 1_024  # messages waiting to be written to one worker


class Line:
    """One attempt on a stream, heard from its making on. Read ``emissions`` or ``close`` it; closed early it is cancelled."""

    def __init__(self, stream: DecodeStream, attempt: Attempt) -> None:
        sampling = attempt.request.sampling
        scores = 0 if attempt.prompt_logprobs is None else len(attempt.request.prompt)  # parts of them, at most
        self.queue: asyncio.Queue[Emission] = asyncio.Queue(sampling.max_tokens + scores + 1)
        self._stream = stream
        self._key = (attempt.request.id, attempt.number)
        self._ended = False
        stream.lines[self._key] = self

    async def emissions(self) -> AsyncGenerator[Emission, None]:
        """Until the last one. Never waits for the worker to clean up."""
        try:
            while not self._ended:
                emission = await self.queue.get()
                self._ended = emission.finish is not None or emission.error is not None
                yield emission
        finally:
            self.close()

    def close(self) -> None:
        """A no-op the second time."""
        if self._stream.lines.get(self._key) is self:
            del self._stream.lines[self._key]
            if not self._ended:
                self._stream.cancel(*self._key)


class DecodeStream:
    """One open ``Tokens`` call. Ends once: by ``fail`` or by ``close``."""

    def __init__(self, worker: WorkerRef) -> None:
        self.worker = worker
        self.broken: PeerSilent | None = None
        self.lines: dict[tuple[str, int], Line] = {}
        self._channel = dial(worker.address, options=_OPTIONS)
        self._call = pb.decode_rpc.DecodeStub(self._channel).Tokens()
        self._out: asyncio.Queue[pb.decode.GatewayMessage] = asyncio.Queue(_OUT_LIMIT)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def line(self, attempt: Attempt) -> Line:
        """To hear of ``attempt``, which ``start`` begins or which is a sibling of one that it begins."""
        if self.broken is not None:
            raise self.broken
        return Line(self, attempt)

    async def start(self, attempt: Attempt, placement: Placement) -> None:
        start = pb.decode.Start(
            attempt=to_wire(attempt, pb.types.Attempt()), placement=to_wire(placement, pb.types.Placement())
        )
        await self._out.put(pb.decode.GatewayMessage(start=start))

    async def run(self, attempt: Attempt, placement: Placement) -> AsyncGenerator[Emission, None]:
        """Emissions of ``attempt`` until its last one; leaving early cancels it."""
        line = self.line(attempt)
        try:
            await self.start(attempt, placement)
            async with aclosing(line.emissions()) as emissions:
                async for emission in emissions:
                    yield emission
        finally:
            line.close()

    def cancel(self, request: str, attempt: int) -> None:
        message = pb.decode.GatewayMessage(cancel=pb.decode.CancelAttempt(request=request, attempt=attempt))
        try:
            if self.broken is None:
                self._out.put_nowait(message)
        except asyncio.QueueFull:
            self.fail(f"{self.worker.id}: reads nothing from its token stream")  # breaking the stream cancels all of it

    async def _read(self) -> None:
        try:
            async for step in self._call:
                for message in step.emissions:
                    self._deliver(message)
            self.fail(f"{self.worker.id}: closed its token stream")
        except grpc.aio.AioRpcError as e:
            _log.info("token stream broke", worker=self.worker.id, why=f"{e.code().name}: {e.details()}")
            self.fail(f"{self.worker.id}: token stream broke ({why_unreachable(e.details())})")
        except Exception as e:  # noqa: BLE001  its attempts must hear of it, or they wait for their deadlines
            _log.warning("token stream cannot be read", worker=self.worker.id, exc_info=e)
            self.fail(f"{self.worker.id}: sent what cannot be read ({type(e).__name__})")

    def _deliver(self, message: pb.decode.Emission) -> None:
        line = self.lines.get((message.request, message.attempt))
        if line is None:
            return  # of an attempt that was left: late, and ignored
        try:
            emission = from_wire(message, Emission)
        except MoonpoolError as e:
            failure = Failure(Reason.PEER_SILENT, f"{self.worker.id}: malformed emission: {e.message}", self.worker.id)
            emission = Emission(RequestId(message.request), message.attempt, message.position, error=failure)
        try:
            line.queue.put_nowait(emission)
        except asyncio.QueueFull:
            self.fail(f"{self.worker.id}: sent more ids than a request may have")

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._out.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as e:
            _log.info("token stream broke", worker=self.worker.id, why=repr(e))
            self.fail(f"{self.worker.id}: token stream broke ({why_unreachable('')})")

    def fail(self, why: str) -> None:
        """Every attempt on this stream fails with PeerSilent, now."""
        if self.broken is not None:
            return
        self.broken = PeerSilent(why, peer=self.worker.id)
        failure = Failure.of(self.broken)
        for (request, attempt), line in self.lines.items():
            if line.queue.full():
                line.queue.get_nowait()  # the failure matters more
            line.queue.put_nowait(Emission(RequestId(request), attempt, 0, error=failure))
        while not self._out.empty():  # nobody writes it any more: who waits for room goes on to the failure
            self._out.get_nowait()
        self._call.cancel()

    async def close(self) -> None:
        self.fail("gateway: leaving")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()


class DecodeStreams:
    """The streams of one gateway, by worker and life; opened on first use."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._streams: dict[tuple[MemberId, Incarnation], DecodeStream] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unsubscribe = peers.subscribe(self._on_change)

    def __len__(self) -> int:
        return len(self._streams)

    def to(self, worker: WorkerRef) -> DecodeStream:
        """The stream to this life of ``worker``; PeerSilent where membership knows better than the placement."""
        change = self._peers.get(worker.id)
        if change is not None and change.member.incarnation >= worker.incarnation:
            if change.liveness is not Liveness.LIVE:
                raise PeerSilent(f"{worker.id}: {change.liveness} ({change.proof})", peer=worker.id)
            if change.member.incarnation > worker.incarnation:
                raise PeerSilent(f"{worker.id}: restarted since it was placed", peer=None)
        key = (worker.id, worker.incarnation)
        stream = self._streams.get(key)
        if stream is not None and stream.broken is not None:
            self._drop(key)
            stream = None
        if stream is None:
            stream = self._streams[key] = DecodeStream(worker)
        return stream

    def _on_change(self, change: MemberChange) -> None:
        for key, stream in list(self._streams.items()):
            member, life = key
            if member != change.member.id:
                continue
            if change.member.incarnation > life:
                stream.fail(f"{member}: replaced by a newer process")
            elif change.member.incarnation == life and change.liveness is not Liveness.LIVE:
                stream.fail(f"{member}: {change.liveness} ({change.proof})")
            if stream.broken is not None:
                self._drop(key)

    def _drop(self, key: tuple[MemberId, Incarnation]) -> None:
        task = asyncio.create_task(self._streams.pop(key).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._unsubscribe()
        for key in list(self._streams):
            self._drop(key)
        await asyncio.gather(*self._closing)
