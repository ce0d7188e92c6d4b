"""Connections that die without a word, and callers of another protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.line import Line

from moonpool.core.membership import PROTOCOL
from moonpool.wire import pb
from moonpool.wire.channels import bind, dial, server
from moonpool.wire.links import ANSWER_S, KEEPALIVE_S, protocol_in

NOTHING = pb.conductor.PlaceRequest()


class Waiting(pb.conductor_rpc.ConductorServicer):
    """Lets every request wait."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Place(self, request: Any, context: Any) -> None:
        await context.write(pb.conductor.PlaceReply(waiting=pb.conductor.PlaceWaiting()))
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def Alive(self, request: Any, context: Any) -> pb.types.Empty:
        return pb.types.Empty()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Waiting, int]]:
    service, host = Waiting(), server()
    pb.conductor_rpc.add_ConductorServicer_to_server(service, host)
    port = bind(host, "127.0.0.1:0")
    await host.start()
    try:
        yield service, port
    finally:
        await host.stop(0)


async def test_both_ends_notice_a_link_that_carries_nothing_any_more_and_a_quiet_one_stays() -> None:
    async with (
        serving() as (service, port),
        Line(port) as line,
        dial(f"127.0.0.1:{line.port}") as channel,
        dial(f"127.0.0.1:{port}") as whole,
    ):
        cut, quiet = (pb.conductor_rpc.ConductorStub(one).Place(NOTHING) for one in (channel, whole))
        for call in (cut, quiet):
            assert (await call.read()).WhichOneof("kind") == "waiting"
        line.fall_silent()
        async with asyncio.timeout(KEEPALIVE_S + ANSWER_S + 10):
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await cut.read()
            await service.left.wait()
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not quiet.done()
        quiet.cancel()


async def test_a_caller_of_another_protocol_is_refused_naming_both() -> None:
    async with serving() as (_, port):
        other = [("grpc.primary_user_agent", f"moonpool-protocol/{PROTOCOL + 1}")]
        async with dial(f"127.0.0.1:{port}", options=other) as channel:
            stub = pb.conductor_rpc.ConductorStub(channel)
            for call in (stub.Alive(pb.types.Empty()), stub.Place(NOTHING).read()):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert f"{PROTOCOL + 1} at the caller, {PROTOCOL} here" in str(refused.value.details())


async def test_whoever_says_no_protocol_may_call() -> None:
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await pb.conductor_rpc.ConductorStub(channel).Alive(pb.types.Empty())


@pytest.mark.parametrize(
    ("agent", "protocol"),
    [("moonpool-protocol/3 grpc-python-asyncio/1.8", "3"), ("grpc-go/1.6", None), ("", None), ("x moonpool-protocol/3", None)],
)
def test_the_protocol_is_read_from_the_callers_agent(agent: str, protocol: str | None) -> None:
    assert protocol_in([("te", "trailers"), ("user-agent", agent)]) == protocol
    assert protocol_in([]) is None
