"""How a client of a chaos run takes each way in which an answer may end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from moonpool.bench.chaos.catalogue import Conversation, Turn
from moonpool.bench.chaos.load import GATEWAYS, Load
from moonpool.bench.chaos.runlog import RunLog
from moonpool.bench.chaos.tally import End, Ended

WANT = (3, 4, 5)


def chunk(*ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "token_ids": list(ids)}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "no more", "code": "peer_silent"}}\n\n'
DEFECT = b'data: {"error": {"message": "oh", "code": "internal_error"}}\n\n'


@asynccontextmanager
async def answering(*parts: bytes, stream: bool = True, status: int = 200, tmp: Path) -> AsyncIterator[Load]:
    """A gateway that says ``parts`` to whoever asks, and then closes the connection."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if status != 200 or not stream:
            return web.Response(body=b"".join(parts), status=status)
        response = web.StreamResponse(headers={"connection": "close"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        if parts[-1] not in (DONE, ERROR, DEFECT):
            assert request.transport is not None
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    talk = Conversation((1,), (Turn((2,), len(WANT), 0.0, 0, stream),), [WANT])
    with RunLog(tmp / "run.jsonl") as log:
        load = Load([talk], dict.fromkeys(GATEWAYS, f"http://127.0.0.1:{port}"), log, 0)
        load.open()
        try:
            yield load
        finally:
            await load.close()
            await runner.cleanup()


async def one(load: Load, cancel_at: int | None = None) -> Ended:
    ended = await load.ask(GATEWAYS[0], load.conversations[0], 0, cancel_at)
    assert ended is not None
    assert not load.in_flight
    return ended


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ((chunk(3), chunk(4, 5), DONE), End.COMPLETED),
        ((chunk(3)[:9], chunk(3)[9:] + chunk(4) + chunk(5), DONE), End.COMPLETED),
        ((chunk(3), chunk(5), DONE), End.WRONG),
        ((chunk(3, 4, 5, 6), DONE), End.WRONG),
        ((chunk(3), chunk(4), DONE), End.LOST),
        ((chunk(3), chunk(4)), End.LOST),
        ((chunk(3, 4, 5),), End.LOST),
        ((chunk(3), ERROR), End.REFUSED),
        ((chunk(3), DEFECT), End.BROKEN),
        ((chunk(4), ERROR), End.WRONG),
    ],
)
async def test_a_stream_is_what_its_ids_and_its_end_say(parts: tuple[bytes, ...], end: End, tmp_path: Path) -> None:
    async with answering(*parts, tmp=tmp_path) as load:
        assert (await one(load)).end is end


async def test_a_broken_stream_of_a_gateway_that_is_being_struck_counts_apart(tmp_path: Path) -> None:
    async with answering(chunk(3), tmp=tmp_path) as load:
        load.gateway_struck[GATEWAYS[0]] = 1e9
        assert (await one(load)).end is End.CUT


async def test_a_client_leaves_in_the_middle_on_purpose(tmp_path: Path) -> None:
    async with answering(chunk(3), chunk(4), chunk(5), DONE, tmp=tmp_path) as load:
        assert (await one(load, cancel_at=2)).end is End.CANCELLED


@pytest.mark.parametrize(
    ("body", "status", "end"),
    [
        (b'{"choices": [{"token_ids": [3, 4, 5]}]}', 200, End.COMPLETED),
        (b'{"choices": [{"token_ids": [3, 4]}]}', 200, End.LOST),
        (b'{"choices": [{"token_ids": [3, 9, 5]}]}', 200, End.WRONG),
        (b'{"error": {"message": "later", "code": "no_path"}}', 503, End.REFUSED),
        (b'{"error": {"message": "oh", "code": "internal_error"}}', 500, End.BROKEN),
        (b"oops", 500, End.LOST),
    ],
)
async def test_a_whole_answer_is_what_its_body_and_its_status_say(body: bytes, status: int, end: End, tmp_path: Path) -> None:
    async with answering(body, stream=False, status=status, tmp=tmp_path) as load:
        ended = await one(load)
    assert ended.end is end
    logged = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["end"] for line in logged] == [end.value]


async def test_nobody_there_is_no_request(tmp_path: Path) -> None:
    async with answering(DONE, tmp=tmp_path) as load:
        load.urls[GATEWAYS[0]] = "http://127.0.0.1:9"
        assert await load.ask(GATEWAYS[0], load.conversations[0], 0, None) is None
        assert load.ended == []
