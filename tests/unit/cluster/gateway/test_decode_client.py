"""One stream to a decode worker that does what none should: its attempts fail at once, none waits for its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from moonpool.cluster.gateway import decode_client
from moonpool.cluster.gateway.decode_client import DecodeStream
from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.placement import Placement, WorkerRef
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.wire import pb

WORKER = WorkerRef(MemberId("decode-0"), Incarnation(1), NodeId("a"), "127.0.0.1:1")


class Call:
    """Takes nothing until it is cancelled; ``says`` is what comes of it, once asked for."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[pb.decode.Step | None] = asyncio.Queue()
        self.over = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[pb.decode.Step | None]:
        while True:
            yield await self.says.get()

    async def write(self, message: pb.decode.GatewayMessage) -> None:
        await self.over.wait()
        raise asyncio.InvalidStateError

    def cancel(self) -> None:
        self.over.set()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    made = Call()

    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def Tokens(self) -> Call:
            return made

    monkeypatch.setattr(pb.decode_rpc, "DecodeStub", Stub)
    return made


async def failure_of(stream: DecodeStream, name: str) -> Failure | None:
    request = Request(RequestId(name), (1, 2, 3), SamplingParams(max_tokens=4), bytes(16), ())
    async with aclosing(stream.run(Attempt(request, 1, (), 10_000), Placement(WORKER, WORKER, booking=1))) as run:
        return (await anext(run)).error


async def test_a_step_that_cannot_be_read_breaks_the_stream(call: Call) -> None:
    stream = DecodeStream(WORKER)
    failing = asyncio.create_task(failure_of(stream, "a"))
    await asyncio.sleep(0.01)
    call.says.put_nowait(None)  # gRPC gives this for bytes that are no message
    async with asyncio.timeout(2):
        failure = await failing
    assert failure is not None
    assert (failure.reason, failure.peer) == (Reason.PEER_SILENT, WORKER.id)
    assert stream.broken is not None
    await stream.close()


async def test_who_waits_for_room_to_begin_fails_with_the_stream(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "_OUT_LIMIT", 2)
    stream = DecodeStream(WORKER)
    failing = [asyncio.create_task(failure_of(stream, str(n))) for n in range(5)]
    await asyncio.sleep(0.01)
    stream.fail("decode-0: silent")
    async with asyncio.timeout(2):
        failures = await asyncio.gather(*failing)
    assert all(failure is not None and failure.reason is Reason.PEER_SILENT for failure in failures)
    await stream.close()
