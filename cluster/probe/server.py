"""A small HTTP server in a thread of its own, for probes: it answers while the process's own loop is busy or hangs.

It knows GET and HEAD, one request per connection, and nothing of a client but a request of bounded size.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from moonpool.cluster.listening import listening_socket
from moonpool.core.errors import ConfigError

MAX_REQUEST = 8_192  # bytes of a request line and its headers
MAX_CONNECTIONS = 64  # more are closed unanswered
CLIENT_S = 5.0  # for a client to send its request and to take the answer
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


# From path and Accept header; called in the server's thread.
Respond = Callable[[str, str], Awaitable[Answer]]


class ProbeServer:
    """Listens from its making until ``close``. ConfigError: the port is taken, or the host none of this machine's."""

    def __init__(self, host: str, port: int, respond: Respond, watch: Callable[[], Coroutine[None, None, None]]) -> None:
        """``watch`` runs in the server's thread for as long as it lives."""
        self._respond, self._watch = respond, watch
        self._open = 0
        self._socket = _listen(host, port)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Blocks until the thread has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLIENT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket, limit=MAX_REQUEST))
        watching = self._loop.create_task(self._watch())
        try:
            self._loop.run_forever()
        finally:
            server.close()
            watching.cancel()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                async with asyncio.timeout(CLIENT_S):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a probe that does not ask, or does not listen
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.split("\r\n")
        method, _, rest = line.partition(" ")
        path, _, version = rest.partition(" ")
        if not version.startswith("HTTP/1"):
            answer = Answer(400, b"a request of HTTP/1.1 is expected\n")
        elif method not in ("GET", "HEAD"):
            answer = Answer(405, b"GET and HEAD only\n")
        else:
            answer = await self._respond(path.partition("?")[0], _field(fields, "accept"))
        start = (
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\ncontent-type: {answer.kind}\r\n"
            f"content-length: {len(answer.body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(start.encode() + (b"" if method == "HEAD" else answer.body))
        await writer.drain()


def _field(fields: list[str], name: str) -> str:
    for field in fields:
        key, _, value = field.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as e:
        raise ConfigError(
            f"cluster.probe_port: cannot listen on {host}:{port} ({e.strerror}); choose another, or 0 for any free one, "
            "and as cluster.probe_host an address of this machine",
            param="cluster.probe_port",
        ) from e
