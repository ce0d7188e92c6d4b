"""The prefill worker's gRPC face: one call per job; breaking it cancels the job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from moonpool.core.errors import Failure, InvalidRequest
from moonpool.core.handoff import Begun, Drained, FirstToken, PrefillEvent, PrefillJob
from moonpool.core.request import PromptLogprobs
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire

if TYPE_CHECKING:
    from moonpool.prefill_worker.worker import PrefillWorker


class PrefillFace(pb.prefill_rpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    def add_to(self, server: grpc.aio.Server) -> None:
        pb.prefill_rpc.add_PrefillServicer_to_server(self, server)

    async def Run(
        self, request: pb.prefill.PrefillJob, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.prefill.PrefillEvent]:
        """Ends after Drained or Failed; a job that is malformed, refused or cancelled fails the same way."""
        try:
            job = from_wire(request, PrefillJob)
        except InvalidRequest as e:
            yield _message(Failure.of(e))
            return
        async with aclosing(self._worker.run(job)) as events:
            async for event in events:
                yield _message(event)


def _message(event: PrefillEvent) -> pb.prefill.PrefillEvent:
    message = pb.prefill.PrefillEvent()
    match event:
        case Begun():
            to_wire(event, message.begun)
        case PromptLogprobs():
            to_wire(event, message.prompt_logprobs)
        case FirstToken():
            to_wire(event, message.first_token)
        case Drained():
            to_wire(event, message.drained)
        case Failure():
            to_wire(event, message.failed)
    return message
