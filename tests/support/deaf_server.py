"""A gRPC server that takes every call and answers none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from moonpool.wire import channels


class _Deaf(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self) -> None:
        self.called: asyncio.Queue[str] = asyncio.Queue()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def hang(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.called.put_nowait(details.method)
            await asyncio.sleep(60.0)
            return b""

        return grpc.unary_unary_rpc_method_handler(hang)


@asynccontextmanager
async def deaf_server() -> AsyncIterator[tuple[str, asyncio.Queue[str]]]:
    """Its address, and the method of each call as it comes. Unary calls only."""
    deaf, server = _Deaf(), channels.server()
    server.add_generic_rpc_handlers((deaf,))
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", deaf.called
    finally:
        await server.stop(None)
