"""Errors over gRPC: one of ours becomes a status with its reason beside it, and becomes the same error at the caller."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc

from moonpool.core.errors import (
    Cancelled,
    DeadlinePassed,
    Failure,
    InvalidRequest,
    MoonpoolError,
    PeerSilent,
    Reason,
    TransferFailed,
    error_for,
)
from moonpool.wire.generated import types_pb2

REASON_KEY = "moonpool-reason"
PEER_KEY = "moonpool-peer"

_SIGNS = (
    ("connection refused", "connection refused"),
    ("timed out", "no answer in time"),
    ("timeout", "no answer in time"),
    ("no route to host", "no route to its host"),
    ("dns resolution failed", "its name does not resolve"),
    ("wrong_version_number", "it speaks without TLS, this side with it: set security.tls alike at both"),
    ("hostname verification", "its certificate is not of this cluster: cluster.name or security.tls_dir is another one's"),
    ("certificate has expired", "its certificate has expired: `moonpool certs renew`, or start the cluster anew"),
    ("handshake failed", "its certificate is not of this side's CA: security.tls_dir has to hold the cluster's"),
)
_HUNG_UP = ("socket closed", "connection reset", "broken pipe")  # by a server that refuses our certificate, or wants one
_REFUSED = "it closed the connection at once: it wants a certificate of its own CA that has not expired (security.tls)"


async def abort(context: Any, error: BaseException) -> NoReturn:
    """End a servicer's call with ``error``; one that is not ours becomes an internal error without its traceback."""
    failure = Failure.of(error)
    exception = failure.to_exception()
    extra = [(REASON_KEY, failure.reason.value)]
    if failure.peer:
        extra.append((PEER_KEY, failure.peer))
    await context.abort(grpc.StatusCode[exception.grpc_status], failure.message, tuple(extra))
    raise exception  # unreachable: abort raises


def error_of(call: Any, who: str) -> MoonpoolError:
    """The MoonpoolError behind a failed call (``grpc.RpcError`` or ``AioRpcError``) to ``who``."""
    code, message = call.code(), call.details() or ""
    extra = dict(call.trailing_metadata() or ())
    if REASON_KEY in extra:
        try:
            return error_for(Reason(extra[REASON_KEY]), message, peer=extra.get(PEER_KEY) or who)
        except ValueError:
            pass  # a newer peer's reason: by status then
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{who} did not answer in time")
    if code is grpc.StatusCode.UNAVAILABLE:
        return PeerSilent(f"{who} cannot be reached ({why_unreachable(message)})", peer=who)
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(f"the call to {who} was cancelled")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(f"{who}: {message}")
    return TransferFailed(f"{who}: {code.name.lower()}: {message}", peer=who)


def why_unreachable(details: str | None) -> str:
    """In a user's words: gRPC's own name addresses, file descriptors and its inner workings."""
    text = (details or "").lower()
    if "failed to connect" in text and any(sign in text for sign in _HUNG_UP):
        return _REFUSED
    return next((words for sign, words in _SIGNS if sign in text), "its connection is gone")


def to_error(error: BaseException) -> types_pb2.Error:
    """For replies that carry an error as a field."""
    failure = Failure.of(error)
    return types_pb2.Error(
        reason=failure.reason.value, message=failure.message, peer=failure.peer, retry_after_s=failure.retry_after_s
    )


def being_cancelled() -> bool:
    """Whether a CancelledError out of a call means the task that made it, and not that the channel was closed under it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
