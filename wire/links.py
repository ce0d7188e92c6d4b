"""How long a connection may be dead before it is noticed, how it is tried again, and who may speak over it.

Every channel and server of Moonpool carries these options. A peer that is frozen, or a link that was cut while both ends
live, breaks nothing by itself: the bytes just do not come. So each end pings.

KEEPALIVE_S + ANSWER_S is the bound: after it every call on the connection fails as UNAVAILABLE. gRPC answers pings in its own
threads, so a process that is busy, however long, is not taken for dead; one that is stopped is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio

from moonpool.core.membership import PROTOCOL
from moonpool.wire.handlers import with_behaviour

KEEPALIVE_S = 2.0
ANSWER_S = 4.0
CONNECT_S = 2.0  # for one try; gRPC's own is 20 s
LONGEST_PAUSE_S = 2.0  # between two tries, with gRPC's jitter; gRPC's own is 120 s

_AGENT = "moonpool-protocol/"
AGENT_KEY = "user-agent"

_PINGS = (
    ("grpc.keepalive_time_ms", int(1e3 * KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", int(1e3 * ANSWER_S)),  # and the socket's TCP_USER_TIMEOUT
    ("grpc.http2.ping_timeout_ms", int(1e3 * ANSWER_S)),  # the one that counts while nothing comes at all: 60 s by itself
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a stream may be quiet for long
)
CLIENT: tuple[tuple[str, Any], ...] = (
    *_PINGS,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", int(1e3 * CONNECT_S)),
    ("grpc.max_reconnect_backoff_ms", int(1e3 * LONGEST_PAUSE_S)),
    ("grpc.primary_user_agent", f"{_AGENT}{PROTOCOL}"),
)
SERVER: tuple[tuple[str, Any], ...] = (
    *_PINGS,
    ("grpc.http2.min_ping_interval_without_data_ms", int(1e3 * KEEPALIVE_S / 4)),  # as many pings as clients send are no abuse
    ("grpc.http2.max_ping_strikes", 0),
)


class SameProtocol(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls of members that speak another protocol, naming both. Whoever says none (a health probe) may call."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        other = protocol_in(handler_call_details.invocation_metadata or ())
        handler = await continuation(handler_call_details)
        return handler if handler is None or other in (None, str(PROTOCOL)) else _refusing(handler, str(other))


def protocol_in(metadata: Iterable[tuple[str, Any]]) -> str | None:
    """What a caller says that it speaks; None where it is none of us."""
    agent = next((value for key, value in metadata if key == AGENT_KEY), "")
    words = str(agent).split()
    return words[0].removeprefix(_AGENT) if words and words[0].startswith(_AGENT) else None


def _refusing(handler: Any, other: str) -> Any:
    message = f"protocol differs: {other} at the caller, {PROTOCOL} here; let both run versions of Moonpool of one protocol"

    async def refuse(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)

    return with_behaviour(handler, refuse)
