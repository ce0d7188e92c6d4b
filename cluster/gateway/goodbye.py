"""Telling keep-alive clients that this connection ends with its next answer: nothing breaks where a gateway leaves."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSE = (b"connection", b"close")


class Goodbye:
    """While ``leaving``, every answer carries ``Connection: close``; the server then closes the connection after it."""

    def __init__(self, app: ASGIApp, leaving: Callable[[], bool]) -> None:
        self._app, self._leaving = app, leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def said(message: Message) -> None:
            if message["type"] == "http.response.start" and self._leaving():
                others = [(name, value) for name, value in message.get("headers", ()) if name.lower() != CLOSE[0]]
                message = {**message, "headers": [*others, CLOSE]}
            await send(message)

        await self._app(scope, receive, said)
