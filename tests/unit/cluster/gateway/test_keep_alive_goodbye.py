"""Clients with kept connections while their gateway leaves: each hears of it by an answer, and no request meets a reset."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from support.gateway_front import Front, says
from support.scripted_cluster import Job
from support.tiny_tokenizer import ids_of

from moonpool.core.request import FinishReason

BODY = b'{"model": "tiny", "prompt": "once", "max_tokens": 3}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: " + str(len(BODY)).encode() + b"\r\n\r\n" + BODY
)


@dataclass
class Client:
    """One connection, one request a period, until the server says goodbye."""

    front: Front
    period_s: float
    answers: list[int] = field(default_factory=list)
    goodbyes: int = 0
    resets: int = 0
    closed_idle: int = 0

    async def run(self) -> None:
        port = int(self.front.gateway.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                writer.write(REQUEST)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                await reader.readexactly(length)
                self.answers.append(int(head.split(" ")[1]))
                if "connection: close" in head:
                    self.goodbyes += 1
                    assert await reader.read() == b""
                    return
                try:
                    async with asyncio.timeout(self.period_s):
                        assert await reader.read() == b""
                    self.closed_idle += 1
                    return
                except TimeoutError:
                    pass
        except (OSError, asyncio.IncompleteReadError):
            self.resets += 1
        finally:
            writer.close()


async def test_every_kept_connection_ends_with_an_answer_that_says_so(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))
    clients = [Client(tiny, 0.3) for _ in range(20)]
    running = [asyncio.create_task(client.run()) for client in clients]
    async with asyncio.timeout(30):
        while not all(client.answers for client in clients):  # noqa: ASYNC110  all are in the middle of their work
            await asyncio.sleep(0.01)
        await tiny.leave()
        await asyncio.gather(*running)
    assert sum(client.resets for client in clients) == 0
    assert all(client.goodbyes + client.closed_idle == 1 for client in clients)
    assert sum(client.goodbyes for client in clients) >= 18, "they ask several times before idle connections are closed"
    assert {status for client in clients for status in client.answers} <= {200, 503}


async def test_idle_connections_end_without_a_word_and_keep_nobody_waiting(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))
    idle = Client(tiny, 60.0)
    running = asyncio.create_task(idle.run())
    async with asyncio.timeout(20):
        while not idle.answers:  # noqa: ASYNC110  it has its answer, and is silent from now on
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await tiny.leave()
        await running
    assert (idle.closed_idle, idle.resets) == (1, 0)
    assert time.monotonic() - began >= 1.0, "it might have sent a request"


async def test_an_answer_that_began_before_is_whole_and_the_next_one_says_goodbye(tiny: Front) -> None:
    go = asyncio.Event()

    async def script(job: Job) -> None:
        await go.wait()
        await job.say(ids_of(tiny.model_dir, "abc"), finish=FinishReason.LENGTH)

    tiny.decode.script = script
    client = Client(tiny, 0.1)
    running = asyncio.create_task(client.run())
    await asyncio.wait_for(tiny.decode.arrived.get(), 5)
    leaving = asyncio.create_task(tiny.leave())
    await asyncio.sleep(0.05)
    go.set()
    async with asyncio.timeout(20):
        await asyncio.gather(leaving, running)
    assert (client.answers, client.goodbyes, client.resets) == ([200], 1, 0)


async def test_a_metric_that_fails_ends_no_request(tiny: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no metric today")

    metrics = tiny.gateway._metrics
    for name in ("count", "finished", "left", "judge"):
        monkeypatch.setattr(metrics, name, fails)
    monkeypatch.setattr(metrics.gaps.of["tiny"], "observe", fails)
    monkeypatch.setattr(metrics.prediction, "labels", fails)
    monkeypatch.setattr(metrics.requests, "labels", fails)
    monkeypatch.setattr(metrics.in_flight, "set", fails)
    body = {"model": "tiny", "prompt": "once", "max_tokens": 3}
    whole = await tiny.client.post("/v1/completions", json=body)
    stream = await tiny.client.post("/v1/completions", json={**body, "stream": True})
    assert (whole.status_code, whole.json()["choices"][0]["text"]) == (200, "abc")
    assert stream.text.rstrip().endswith("[DONE]")
    assert tiny.gateway.numbers()["requests_in_flight"] == 0
    assert tiny.gateway.numbers()["metrics_failed_count"] >= 4
    page = await tiny.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert page.status_code == 200 and page.text.endswith("# EOF\n")
