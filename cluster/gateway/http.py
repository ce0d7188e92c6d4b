"""HTTP below the endpoints: bounded bodies, error answers, event streams, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moonpool.cluster.gateway import sse
from moonpool.core.errors import Cancelled, DeadlinePassed, MoonpoolError, NoPath, Overloaded, PromptTooLarge, Reason, Refused

T = TypeVar("T")
_DRAIN_BODY = 8  # times the limit: read and dropped, so that a client still sending gets to see its 413
_CODES = {Reason.UNKNOWN_MODEL: "model_not_found"}
_RETRY_STATUS = (429, 503)
_UNREAD = (Reason.PROMPT_TOO_LARGE, Reason.OVERLOADED, Reason.DEADLINE)  # reasons that may have come amid a body


class BodyRoom:
    """Bytes that the bodies of all requests in flight may take together. One event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        """Overloaded where there is no room for ``size`` bytes more; else ``give`` must follow."""
        if self.held + size > self._limit:
            raise Overloaded(
                f"gateway: {self.held} of {self._limit} bytes of request bodies held (gateway.max_held_bytes); try again later",
                retry_after_s=1.0,
            )
        self.held += size

    def give(self, size: int) -> None:
        self.held -= size


async def read_body(request: Request, limit: int, seconds: float, room: BodyRoom) -> bytes:
    """The whole body, at most ``limit`` bytes, which the caller gives back to ``room``; nothing is held where it raises.

    PromptTooLarge before anything is parsed, DeadlinePassed if it is not there within ``seconds``, Overloaded.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            await _read_into(body, request, limit, room)
    except BaseException as e:
        room.give(len(body))
        if isinstance(e, ClientDisconnect):
            raise Cancelled("request: the client left while sending its body") from None
        if isinstance(e, TimeoutError):
            raise DeadlinePassed(f"body: not received within {seconds:.0f} s (gateway.body_ms); send it faster") from None
        raise
    return bytes(body)


async def _read_into(body: bytearray, request: Request, limit: int, room: BodyRoom) -> None:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    seen = 0
    async for part in request.stream():
        seen += len(part)
        too_large = too_large or seen > limit
        if seen > limit * _DRAIN_BODY:
            break
        if not too_large:
            room.take(len(part))
            body += part
    if too_large:
        raise PromptTooLarge(f"body: larger than {limit} bytes; shorten the prompt, or raise gateway.max_body_bytes")


def error_value(error: MoonpoolError) -> dict[str, Any]:
    """OpenAI's error object."""
    status = error.http_status
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    code = _CODES.get(error.reason, error.reason.value)
    missing = {"missing": list(error.missing)} if isinstance(error, NoPath) and error.missing else {}
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code, **missing}}


def error_response(error: MoonpoolError) -> Response:
    headers = {}
    if error.http_status in _RETRY_STATUS:
        wait = error.retry_after_s if isinstance(error, Refused) else 1.0
        headers["retry-after"] = str(max(1, round(wait)))
    if error.reason in _UNREAD:
        headers["connection"] = "close"  # part of the body may be unread
    return json_response(error_value(error), status=error.http_status, headers=headers)


def json_response(value: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return written_response(sse.to_json(value), status=status, headers=headers)


def written_response(text: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Of JSON ``text``."""
    return Response(text, status, dict(headers or {}), "application/json")


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result; Cancelled, and ``work`` cancelled, as soon as the client closes its connection."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("request: the client closed its connection")
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class EventStream(Response):
    """Sends ``events`` as they come. A client that leaves ends them; ``done`` then runs, in every case, once.

    ``events`` reports its own errors as events: one that escapes would cut the connection.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, headers: Mapping[str, str], done: Callable[[], None]) -> None:
        super().__init__(headers={**sse.HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(_left(receive))
        body = asyncio.create_task(self._send(send))
        try:
            await asyncio.wait({left, body}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (left, body):
                task.cancel()
            await asyncio.gather(left, body, return_exceptions=True)
            self._done()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
