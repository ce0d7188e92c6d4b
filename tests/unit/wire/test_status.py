"""Errors that cross a real gRPC call arrive as what they were."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from moonpool.core.errors import (
    Bug,
    Busy,
    Cancelled,
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    LayoutMismatch,
    MoonpoolError,
    PeerSilent,
    TransferFailed,
)
from moonpool.wire import channels, pb
from moonpool.wire.status import abort, error_of, to_error


class Failing(pb.store_rpc.StoreServicer):
    """Every call of Stats fails with ``error``; Clear ends with a bare status."""

    error: BaseException = Busy("full", peer="store-a")
    code = grpc.StatusCode.UNAVAILABLE

    async def Stats(self, request: pb.types.Empty, context: Any) -> pb.store.StatsReply:
        await abort(context, self.error)

    async def Clear(self, request: pb.store.KeysRequest, context: Any) -> pb.store.ClearReply:
        await context.abort(self.code, "why")


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Failing, Any]]:
    server, servicer = channels.server(), Failing()
    pb.store_rpc.add_StoreServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, pb.store_rpc.StoreStub(channel)
    await server.stop(None)


async def failure(call: Any) -> MoonpoolError:
    with pytest.raises(grpc.aio.AioRpcError) as e:
        await call
    return error_of(e.value, "store-a")


OURS = [
    Busy("full", peer="store-b"),
    LayoutMismatch("16 here, 32 there"),
    InvalidRequest("keys: no", param="keys"),
    ConfigError("x"),
]


@pytest.mark.parametrize("error", OURS, ids=lambda error: error.reason)
async def test_an_error_of_ours_arrives_as_itself(ends: tuple[Failing, Any], error: MoonpoolError) -> None:
    servicer, stub = ends
    servicer.error = error
    arrived = await failure(stub.Stats(pb.types.Empty()))
    assert type(arrived) is type(error)
    assert arrived.message == error.message
    if isinstance(arrived, Busy):
        assert arrived.peer == "store-b"


async def test_any_other_exception_arrives_as_a_bug_that_names_its_type(ends: tuple[Failing, Any]) -> None:
    servicer, stub = ends
    servicer.error = KeyError("secret path")
    arrived = await failure(stub.Stats(pb.types.Empty()))
    assert isinstance(arrived, Bug)
    assert "KeyError" in arrived.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, PeerSilent),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlinePassed),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNKNOWN, TransferFailed),
    ],
)
async def test_a_bare_status_is_read_by_its_code(
    ends: tuple[Failing, Any], code: grpc.StatusCode, kind: type[MoonpoolError]
) -> None:
    servicer, stub = ends
    servicer.code = code
    assert type(await failure(stub.Clear(pb.store.KeysRequest()))) is kind


async def test_a_peer_that_is_not_there_is_said_in_a_users_words() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        arrived = await failure(pb.store_rpc.StoreStub(channel).Stats(pb.types.Empty()))
    assert isinstance(arrived, PeerSilent)
    assert arrived.message == "store-a cannot be reached (connection refused)"


def test_replies_carry_errors_as_a_field() -> None:
    message = to_error(Busy("full", peer="store-a"))
    assert (message.reason, message.message, message.peer) == ("busy", "full", "store-a")
