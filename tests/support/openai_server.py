"""Real HTTP servers on loopback with scripted answers, and a clock that only moves when somebody sleeps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

Body = dict[str, Any]
Script = Callable[[web.Request, Body], Awaitable[web.StreamResponse]]


def event(value: Body | str) -> bytes:
    return b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts})


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


def prompt_tokens(body: Body) -> int:
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else prompt.count(" ")


async def answer_at_once(request: web.Request, body: Body) -> web.StreamResponse:
    """As many pieces of text as tokens were asked for, without any delay."""
    response = await open_stream(request)
    tokens = body["max_tokens"]
    pieces = b"".join(text(" a") for _ in range(tokens - 1)) + text(" a", "length")
    await response.write(pieces + usage(prompt_tokens(body), tokens) + event("[DONE]"))
    return response


class Seen:
    """What reached a server."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []


def _application(script: Script, seen: Seen, cluster: Body | None) -> web.Application:
    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.bodies.append(body)
        seen.headers.append({k.lower(): v for k, v in request.headers.items()})
        return await script(request, body)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def describe(request: web.Request) -> web.Response:
        return web.json_response(cluster)

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
    if cluster is not None:
        app.add_routes([web.get("/v1/cluster", describe)])
    return app


@asynccontextmanager
async def serving(script: Script, *, cluster: Body | None = None) -> AsyncIterator[tuple[str, Seen]]:
    """A server on this event loop: (url, what it saw)."""
    seen = Seen()
    runner = web.AppRunner(_application(script, seen, cluster), shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_thread(script: Script, *, cluster: Body | None = None) -> Iterator[tuple[str, Seen]]:
    """The same on a loop of its own, for code under test that runs its own loop."""
    ready = threading.Event()
    found: list[tuple[str, Seen]] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(script, cluster=cluster) as served:
            found.append(served)
            ready.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(30)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)


class VirtualClock:
    """Moves only in ``sleep``; ``overshoot`` says how much too late each sleep ends."""

    def __init__(self, overshoot: Callable[[], float] = lambda: 0.0) -> None:
        self.time = 100.0
        self._overshoot = overshoot

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self.time += seconds + self._overshoot()
        await asyncio.sleep(0)
