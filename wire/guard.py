"""Refuses calls of whoever has no right to them, before the service sees them. One for every server with TLS."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from moonpool.core.errors import ConfigError
from moonpool.core.principal import Principal
from moonpool.wire.handlers import with_behaviour
from moonpool.wire.rights import alike, may, name_of

URI = "peer_uri"  # gRPC's name for the URIs among a certificate's alternative names
REMEMBERED = 256  # refusals that are logged once each; more are not logged
log = structlog.get_logger(__name__)


def caller_of(context: Any) -> Principal | None:
    """Who calls, by its certificate; None: without TLS nobody knows. ConfigError: the certificate names nobody of ours."""
    shown = context.auth_context()
    if shown.get("transport_security_type") != [b"ssl"]:
        return None
    uris = shown.get(URI)
    return Principal.parse(uris[0].decode(errors="replace") if uris else "")


async def require_own_name(context: Any, member: str) -> None:
    """Ends the call of whoever speaks for another member than its certificate's."""
    caller = caller_of(context)
    if caller is not None and caller.member != member:
        why = f"{caller} may not speak for {member}: its certificate is not that one's"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


async def require_own_role(context: Any, role: str) -> None:
    """Ends the call of whoever says that it is something else than its certificate's party."""
    caller = caller_of(context)
    if caller is not None and not alike(caller.party, role):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{caller} may not be a {role}: its certificate says otherwise")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """``cluster``: whose certificates count."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._guarded: dict[str, tuple[Any, Any]] = {}  # method -> its handler, and that one behind the guard
        self._said: set[str] = set()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        found = self._guarded.get(details.method)
        if found is None or found[0] is not handler:
            found = self._guarded[details.method] = (handler, _wrapped(handler, details.method, self._check))
        return found[1]

    async def _check(self, context: Any, method: str) -> None:
        try:
            caller = caller_of(context)
        except ConfigError as e:
            await self._refuse(context, e.message)
            return
        if caller is None or caller.cluster != self._cluster:
            whose = caller.uri if caller else "a caller without a certificate"
            await self._refuse(context, f"{whose} is not of the cluster {self._cluster!r}")
        elif not may(caller.party, method):
            await self._refuse(context, f"{caller} may not call {name_of(method)}; see the table in docs/security.md")

    async def _refuse(self, context: Any, why: str) -> None:
        if why not in self._said and len(self._said) < REMEMBERED:
            self._said.add(why)
            log.warning("call_refused", why=why, peer=context.peer())
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


def _wrapped(handler: Any, method: str, check: Callable[[Any, str], Awaitable[None]]) -> Any:
    """``handler`` behind ``check``: of any of gRPC's four kinds, the streaming ones as generators or as coroutines."""
    inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    async def call(request: Any, context: Any) -> Any:
        await check(context, method)
        return await inner(request, context)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context, method)
        async with aclosing(inner(request, context)) as answers:
            async for answer in answers:
                yield answer

    return with_behaviour(handler, stream if inspect.isasyncgenfunction(inner) else call)
