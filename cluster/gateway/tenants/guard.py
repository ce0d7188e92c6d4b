"""In front of every route: no key, no answer. What is open to everybody says nothing of the cluster's work."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonpool.cluster.gateway.http import error_response
from moonpool.cluster.gateway.tenants.book import Access
from moonpool.cluster.gateway.tenants.caller import ANYBODY, Caller
from moonpool.cluster.gateway.tenants.gate import Gate
from moonpool.core.errors import Forbidden, Unauthorised

OPEN = ("/health", "/ready", "/console")  # the console's page is the same for everybody, what it shows is not
OPEN_BELOW = "/console/static/"
FOR_ADMINS = ("/metrics", "/admin", "/console/api")
HEAR_OUT_S = 0.02  # a refused client's body is read for so long, that it gets to see why

_CALLER = "moonpool.caller"


def caller_of(request: Request) -> Caller:
    found = request.scope.get(_CALLER, ANYBODY)
    assert isinstance(found, Caller)  # nobody but the guard sets it
    return found


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _open(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            scope[_CALLER] = self._gate.caller(_authorization(scope), _needed(scope["path"]))
        except (Unauthorised, Forbidden) as e:
            await hear_out(receive)
            response = error_response(e)
            if isinstance(e, Unauthorised):
                response.headers["www-authenticate"] = "Bearer"
            response.headers["connection"] = "close"  # part of the body may be unread
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_BELOW)


def _needed(path: str) -> Access:
    path = path.removesuffix("\n")  # a route matches with a line end behind it too
    admin = any(path == name or path.startswith(name + "/") for name in FOR_ADMINS)
    return Access.ADMIN if admin else Access.USER


def _authorization(scope: Scope) -> str | None:
    """Of two, none: which one is meant?"""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return found[0].decode("latin-1") if len(found) == 1 else None


async def hear_out(receive: Receive) -> None:
    """A server that answers and closes while a client still sends may be taken for a broken one."""
    message: Message = {"type": "http.request", "more_body": True}
    try:
        async with asyncio.timeout(HEAR_OUT_S):
            while message["type"] == "http.request" and message.get("more_body"):
                message = await receive()
    except TimeoutError:
        pass
