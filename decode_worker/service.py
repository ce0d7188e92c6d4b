"""The decode worker's gRPC face: one bidirectional token stream per gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from moonpool.core.errors import Failure, InvalidRequest
from moonpool.core.ids import RequestId
from moonpool.core.placement import Placement
from moonpool.core.request import Attempt, Emission
from moonpool.decode_worker.stream import TokenStream
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire

if TYPE_CHECKING:
    from moonpool.decode_worker.worker import DecodeWorker


class DecodeFace(pb.decode_rpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    def add_to(self, server: grpc.aio.Server) -> None:
        pb.decode_rpc.add_DecodeServicer_to_server(self, server)

    async def Tokens(
        self, request_iterator: AsyncIterator[pb.decode.GatewayMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.decode.Step]:
        """Ends when the gateway ends its side, breaks the call, or falls too far behind; its attempts end with it."""
        stream = self._worker.open_stream()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while emissions := await stream.take():
                step = pb.decode.Step()
                for emission in emissions:
                    to_wire(emission, step.emissions.add())
                    if emission.prompt_logprobs is not None:  # big: a message each
                        yield step
                        step = pb.decode.Step()
                if step.emissions:
                    yield step
        finally:
            reader.cancel()
            self._worker.close_stream(stream)
        if stream.overflowed:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the reader of this token stream is too slow")

    async def _read(self, messages: AsyncIterator[pb.decode.GatewayMessage], stream: TokenStream) -> None:
        try:
            async for message in messages:
                if message.HasField("start"):
                    self._start(message.start, stream)
                elif message.HasField("cancel"):
                    self._worker.cancel(stream, RequestId(message.cancel.request), message.cancel.attempt)
        finally:
            stream.close()

    def _start(self, start: pb.decode.Start, stream: TokenStream) -> None:
        try:
            attempt, placement = from_wire(start.attempt, Attempt), from_wire(start.placement, Placement)
        except InvalidRequest as e:
            raw = start.attempt
            stream.put(Emission(RequestId(raw.request.id), raw.number, len(raw.emitted), error=Failure.of(e)))
            return
        self._worker.begin(stream, attempt, placement)
