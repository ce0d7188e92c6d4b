"""What is refused before any worker is asked, and in which words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway_front import Front, front, says, silence
from support.scripted_cluster import prefill_member
from support.tiny_tokenizer import CONTEXT

from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness

PATHS = ("/v1/completions", "/v1/chat/completions")


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    return {"model": "tiny", **prompt, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "gpt-5"}, 404, "model", "model_not_found"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_request"),
        ({"max_tokens": -3}, 400, "max_tokens", "invalid_request"),
        ({"n": 0}, 400, "n", "invalid_request"),
        ({"temperature": -1}, 400, "temperature", "invalid_request"),
        ({"top_p": 0}, 400, "top_p", "invalid_request"),
        ({"presence_penalty": 99}, 400, "presence_penalty", "invalid_request"),
        ({"stop_token_ids": [10**6]}, 400, "stop_token_ids", "invalid_request"),
        ({"max_tokens": 10 * CONTEXT}, 400, "max_tokens", "context_length_exceeded"),
        ({"min_tokens": CONTEXT}, 400, "min_tokens", "invalid_request"),
    ],
)
async def test_invalid_fields_are_plain_json_errors_on_both_endpoints(
    tiny: Front, stream: bool, fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    for path in PATHS:
        answer = await tiny.client.post(path, json=body(path, stream=stream, **fields))
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
        assert error["message"].startswith(param)
        assert answer.headers["x-moonpool-request-id"].startswith("req-")
    assert not tiny.conductor.placed
    assert tiny.gateway.numbers()["requests_in_flight"] == 0


@pytest.mark.parametrize(
    ("prompt", "wanted", "status"),
    [(CONTEXT - 5, 10, 400), (CONTEXT, None, 400), (CONTEXT + 1, None, 400), (CONTEXT - 1, None, 200), (5, 10 * CONTEXT, 400)],
)
async def test_context_limit_errors_name_prompt_request_and_limit(
    tiny: Front, prompt: int, wanted: int | None, status: int
) -> None:
    tiny.decode.script = says(9)
    fields = {} if wanted is None else {"max_tokens": wanted}
    answer = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": [7] * prompt, **fields})
    assert answer.status_code == status, answer.text
    if status == 200:
        assert tiny.decode.jobs[0].attempt.request.sampling.max_tokens == 1
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    else:
        message = answer.json()["error"]["message"]
        assert all(str(n) in message for n in (prompt, wanted or 1, CONTEXT))
        assert not tiny.conductor.placed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_above_every_prefill_worker_s_capacity(tiny_dir: Path, stream: bool) -> None:
    async with front(tiny_dir, max_prompt=64) as tiny:
        ask = {"model": "tiny", "max_tokens": 4, "stream": stream}
        refused = await tiny.client.post("/v1/completions", json={**ask, "prompt": [7] * 74})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "prompt_too_large")
        assert "74" in refused.json()["error"]["message"]
        assert "64" in refused.json()["error"]["message"]
        assert not tiny.decode.jobs
        metrics = (await tiny.client.get("/metrics")).text
        assert 'moonpool_gateway_requests_total{endpoint="completions",model="tiny",outcome="prompt_too_large"} 1.0' in metrics
        tiny.membership.say(prefill_member(name="prefill-1", max_prompt=128))
        tiny.decode.script = says(9)
        assert (await tiny.client.post("/v1/completions", json={**ask, "prompt": [7] * 74})).status_code == 200


async def test_what_no_decode_worker_could_hold_is_above_the_limit(tiny_dir: Path) -> None:
    async with front(tiny_dir, decode_pages=100) as tiny:
        answer = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": [7] * 90, "max_tokens": 11})
        assert answer.status_code == 400
        assert "100" in answer.json()["error"]["message"]


async def test_an_id_outside_the_vocabulary(tiny: Front) -> None:
    answer = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": [7, 10**6]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_an_over_long_body_is_refused_on_bytes(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"max_body_bytes": 1024}}) as tiny:

        async def chunks() -> Any:
            for _ in range(30):
                yield b"x" * 100

        for content in (b"[" * 2000, chunks()):
            answer = await tiny.client.post("/v1/completions", content=content)
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["code"] == "prompt_too_large"
            assert "gateway.max_body_bytes" in answer.json()["error"]["message"]
        fits = json.dumps({"model": "tiny", "prompt": "x"}).ljust(1024).encode()
        tiny.decode.script = says(9)
        assert (await tiny.client.post("/v1/completions", content=fits)).status_code == 200


async def test_malformed_json(tiny: Front) -> None:
    answer = await tiny.client.post("/v1/completions", content=b'{"model": "tiny", "prompt": ')
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body: not valid JSON")


async def test_unknown_routes_and_methods_answer_in_the_same_shape(tiny: Front) -> None:
    for answer, status in (
        (await tiny.client.get("/v1/nothing"), 404),
        (await tiny.client.get("/v1/completions"), 405),
        (await tiny.client.get("/v1/models/other"), 404),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_placement_is_429_with_retry_after(tiny: Front, stream: bool) -> None:
    refusal = Failure(Reason.TARGETS_MISSED, "ttft: 900 ms predicted, 500 ms asked for", retry_after_s=3.4)
    tiny.conductor.decide = lambda request: refusal
    headers = {"x-ttft-target-ms": "500", "x-tbt-target-ms": "80.5"}
    answer = await tiny.client.post("/v1/completions", json=body("", stream=stream), headers=headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    asked = tiny.conductor.placed[0]
    assert (asked.targets.ttft_ms, asked.targets.tbt_ms) == (500, 80.5)
    assert not tiny.decode.jobs
    assert len(tiny.conductor.placed) == 1


async def test_targets_come_from_the_configuration_unless_a_header_says_otherwise(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"ttft_target_ms": 700.0}}) as tiny:
        tiny.decode.script = says(9)
        for headers, right in (({}, 700), ({"x-ttft-target-ms": "20"}, 20), ({"x-ttft-target-ms": "0"}, None)):
            assert (await tiny.client.post("/v1/completions", json=body(""), headers=headers)).status_code == 200
            assert tiny.conductor.placed[-1].targets.ttft_ms == right
            assert tiny.conductor.placed[-1].targets.tbt_ms is None
        for bad in ("soon", "-1", "nan", "inf", "5e-324", "1e400"):
            answer = await tiny.client.post("/v1/completions", json=body(""), headers={"x-ttft-target-ms": bad})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-ttft-target-ms")


async def test_more_requests_than_the_limit_are_refused_early(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"timing": {"queue_limit": 2}}) as tiny:
        tiny.decode.script = silence
        held = [asyncio.create_task(tiny.client.post("/v1/completions", json=body(""))) for _ in range(2)]
        for _ in held:
            await asyncio.wait_for(tiny.decode.arrived.get(), 5)
        answer = await tiny.client.post("/v1/completions", json=body(""))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        many = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": ["a", "b", "c"]})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "prompt")
        for job in tiny.decode.jobs:
            await job.fail(Reason.BUG)
        assert [r.status_code for r in await asyncio.gather(*held)] == [500, 500]
        tiny.decode.script = says(9)
        assert (await tiny.client.post("/v1/completions", json=body(""))).status_code == 200


async def test_without_workers_a_good_request_gets_503_and_a_bad_one_still_400(tiny: Front) -> None:
    for member in (*tiny.membership.live(Role.DECODE), *tiny.membership.live(Role.PREFILL)):
        tiny.membership.say(member, Liveness.GONE, "killed")
    good = await tiny.client.post("/v1/completions", json=body(""))
    assert (good.status_code, good.json()["error"]["code"]) == (503, "no_path")
    assert "prefill" in good.json()["error"]["message"]
    assert int(good.headers["retry-after"]) >= 1
    bad = await tiny.client.post("/v1/completions", json=body("", max_tokens=10 * CONTEXT))
    assert bad.status_code == 400


async def test_client_ids_are_echoed_and_ours_are_always_different(tiny: Front) -> None:
    tiny.decode.script = says(9)
    answers = await asyncio.gather(
        *(
            tiny.client.post("/v1/completions", json=body("", request_id="mine"), headers={"x-request-id": "mine"})
            for _ in range(20)
        )
    )
    assert {a.headers["x-request-id"] for a in answers} == {"mine"}
    assert len({a.headers["x-moonpool-request-id"] for a in answers}) == 20
    assert len({job.attempt.request.id for job in tiny.decode.jobs}) == 20
    nameless = await tiny.client.post("/v1/completions", json=body(""))
    assert nameless.headers["x-request-id"] == nameless.headers["x-moonpool-request-id"]


async def test_a_header_that_cannot_be_echoed_is_not(tiny: Front) -> None:
    url = httpx.URL(tiny.gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    raw = b'{"model":"no","prompt":"x"}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: \xe9\r\ncontent-length: %d\r\n\r\n%s"
        % (len(raw), raw)
    )
    answer = await asyncio.wait_for(reader.read(-1), 5)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"x-request-id: \xe9" not in answer
