"""Clients that are slow, silent, many or endless: each costs a bounded amount, and the others are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.gateway_front import Front, eventually, front, says, silence
from support.scripted_cluster import Job
from support.tiny_tokenizer import write_tiny_model

from moonpool.core.request import FinishReason

OPEN = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
COMPLETION = {"model": "tiny", "prompt": "once"}


class Wire:
    """A connection that is written to byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def trickle(self, data: bytes, pause_s: float) -> None:
        """Until the other side closes."""
        try:
            for byte in data:
                await self.say(bytes([byte]))
                await asyncio.sleep(pause_s)
        except OSError:
            pass

    async def rest(self) -> bytes:
        """Everything until the other side closes, in whatever way."""
        said = b""
        try:
            async with asyncio.timeout(10):
                while part := await self.reader.read(65_536):
                    said += part
        except OSError:
            pass
        return said


@asynccontextmanager
async def wire(f: Front, sock: socket.socket | None = None) -> AsyncIterator[Wire]:
    at = urlsplit(f.gateway.url)
    if sock is None:
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
    else:
        await asyncio.get_running_loop().sock_connect(sock, (at.hostname, at.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def answered(f: Front) -> None:
    """Another client is served."""
    f.decode.script = says(65)
    response = await f.client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 200, response.text


def post(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return OPEN + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw


async def test_connections_above_the_limit_are_refused_and_those_before_stay(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"max_connections": 3}}) as f:
        async with wire(f) as one, wire(f), wire(f):
            await eventually(lambda: f.gateway.numbers()["connections"] == 3)
            async with wire(f) as surplus:
                said = await surplus.rest()
            assert said.startswith(b"HTTP/1.1 503 ") and b"gateway.max_connections" in said
            f.decode.script = says(65)
            await one.say(post({**COMPLETION, "max_tokens": 1}))
            assert (await one.reader.readline()).startswith(b"HTTP/1.1 200 ")
        await eventually(lambda: f.gateway.numbers()["connections"] == 0)
        await answered(f)
        assert f.gateway.numbers()["connections_refused_count"] == 1


async def test_a_connection_that_never_comes_to_a_request_is_closed(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"head_ms": 150}}) as f:
        async with wire(f) as silent, wire(f) as slow:
            trickling = asyncio.create_task(slow.trickle(OPEN + b"x: " + b"y" * 10_000, 0.02))
            await answered(f)
            assert await silent.rest() == b""
            assert await slow.rest() == b""
            trickling.cancel()
        await eventually(lambda: f.gateway.numbers()["slow_heads_cut_count"] == 2)


async def test_a_request_on_a_kept_connection_has_as_long_for_its_head(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"head_ms": 150}}) as f:
        f.decode.script = says(65)
        async with wire(f) as client:
            await client.say(post({**COMPLETION, "max_tokens": 1}))
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            await client.say(OPEN)
            await client.rest()
        assert f.gateway.numbers()["slow_heads_cut_count"] == 1


@pytest.mark.parametrize("endless", [b"x: " + b"y" * 1_000_000, b"a: b\r\n" * 20_000], ids=["one header", "many headers"])
async def test_endless_heads_are_cut_off(tiny: Front, endless: bytes) -> None:
    async with wire(tiny) as client:
        try:
            await client.say(OPEN + endless)
        except OSError:
            pass
        await client.rest()
    await eventually(lambda: tiny.gateway.numbers()["large_heads_cut_count"] == 1)
    await answered(tiny)


async def test_endless_trailers_are_cut_off(tiny: Front) -> None:
    async with wire(tiny) as client:
        try:
            await client.say(OPEN + b"transfer-encoding: chunked\r\n\r\n0\r\n")
            await client.say(b"a: b\r\n" * 100_000)
        except OSError:
            pass
        await client.rest()
    await eventually(lambda: tiny.gateway.numbers()["large_heads_cut_count"] == 1)
    await answered(tiny)


async def test_a_body_that_trickles_in_ends_in_time(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"body_ms": 200}}) as f:
        async with wire(f) as slow:
            await slow.say(OPEN + b"content-length: 5000\r\n\r\n" + b"x" * 1_000)
            trickling = asyncio.create_task(slow.trickle(b"y" * 4_000, 0.02))
            await answered(f)
            said = await slow.rest()
            trickling.cancel()
        assert said.startswith(b"HTTP/1.1 504 ") and b"gateway.body_ms" in said
        await eventually(lambda: f.gateway.numbers()["held_body_bytes"] == 0)


async def test_bodies_of_all_clients_together_take_bounded_memory(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"max_held_bytes": 4_000}}) as f:
        async with wire(f) as one, wire(f) as two:
            await one.say(OPEN + b"content-length: 3900\r\n\r\n" + b"x" * 3_000)
            await eventually(lambda: f.gateway.numbers()["held_body_bytes"] == 3_000)
            await two.say(OPEN + b"content-length: 3900\r\n\r\n" + b"x" * 3_000)
            said = await two.rest()
            assert said.startswith(b"HTTP/1.1 429 ") and b"gateway.max_held_bytes" in said
            await answered(f)  # a small one fits beside it
        await eventually(lambda: f.gateway.numbers()["held_body_bytes"] == 0)


async def test_a_reader_that_stands_still_is_cut_off_and_holds_up_nobody(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", context=100_000)

    async def endless(job: Job) -> None:
        await job.say([65] * 50_000, finish=FinishReason.LENGTH)

    async with front(model, config={"gateway": {"slow_reader_ms": 300}}) as f:
        f.decode.script = endless
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        async with wire(f, sock) as client:
            await client.say(post({**COMPLETION, "max_tokens": 50_000, "stream": True}))
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
            job = await f.decode.arrived.get()
            await answered(f)
            async with asyncio.timeout(20):
                await job.cancelled.wait()
        assert f.gateway.numbers()["slow_readers_cut_count"] == 1
        await eventually(lambda: f.gateway.numbers()["requests_in_flight"] == 0)
        assert 'outcome="cancelled"} 1.0' in (await f.client.get("/metrics")).text


@pytest.mark.parametrize(("prompts", "why"), [(10_000, "up to 4096"), (4_000, "4000 prompts in one request")])
async def test_thousands_of_prompts_in_one_request_are_refused_at_once(tiny: Front, prompts: int, why: str) -> None:
    response = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": [[65]] * prompts})
    assert response.status_code == 400
    assert why in response.json()["error"]["message"]
    await answered(tiny)


async def test_a_deadline_that_is_no_time_is_refused_by_name(tiny: Front) -> None:
    response = await tiny.client.post("/v1/completions", json=COMPLETION, headers={"x-deadline-ms": "soon"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(
        "x-deadline-ms: 'soon' is not a time; give milliseconds, or 0 for timing."
    )


async def test_a_client_may_give_its_request_less_time_than_everybody_has(tiny: Front) -> None:
    tiny.decode.script = silence
    response = await tiny.client.post("/v1/completions", json=COMPLETION, headers={"x-deadline-ms": "80"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_passed"
    job = await tiny.decode.arrived.get()
    await asyncio.wait_for(job.cancelled.wait(), 2)
