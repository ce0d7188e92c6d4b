"""Answers go out as they are written. With Nagle's algorithm every second one on a kept connection waits 40 ms for an ACK."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from moonpool.cluster.gateway import service
from moonpool.cluster.probe import server
from moonpool.core.config import GatewayConfig


@pytest.mark.parametrize(
    "listen",
    [lambda: service._listen(GatewayConfig(port=0)), lambda: server._listen("127.0.0.1", 0)],
    ids=["gateway", "probe"],
)
async def test_accepted_connections_do_not_gather_small_writes(listen: Callable[[], socket.socket]) -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        accepted.set_result(found)

    listener = listen()
    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        assert await asyncio.wait_for(accepted, 10)
        writer.close()
        await writer.wait_closed()
