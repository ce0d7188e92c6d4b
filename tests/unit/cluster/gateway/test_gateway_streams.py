"""Answers over real HTTP: framing, text, usage, finish reasons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway_front import Front, front, says
from support.scripted_cluster import Job
from support.strict_sse import StrictSSE, parsed
from support.tiny_tokenizer import byte_alphabet, ids_of
from tokenizers import Tokenizer as Backend

from moonpool.core.errors import Reason
from moonpool.core.request import FinishReason, Sampled, TopLogprob

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "once"}


@pytest.fixture
async def end_id(tiny: Front) -> int:
    return int(Backend.from_file(str(tiny.model_dir / "tokenizer.json")).token_to_id("<|im_end|>"))


async def stream(tiny: Front, path: str, body: dict[str, Any]) -> tuple[httpx.Response, StrictSSE]:
    answer = await tiny.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return answer, parsed(answer.content)


def chat_text(events: list[dict[str, Any]]) -> str:
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e.get("choices"))


def completion_text(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)


async def test_a_chat_stream_opens_with_the_role_and_ends_with_done(tiny: Front, end_id: int) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "hello"), end_id, finish=FinishReason.STOP)
    answer, sse = await stream(tiny, "/v1/chat/completions", CHAT)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert sse.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat_text(sse.events) == "hello"
    reasons = [e["choices"][0]["finish_reason"] for e in sse.events]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert {(e["object"], e["model"], e["id"]) for e in sse.events} == {
        ("chat.completion.chunk", "tiny", "chatcmpl-" + answer.headers["x-moonpool-request-id"])
    }
    assert sse.done


@pytest.mark.parametrize(
    ("options", "usage_chunks"),
    [({}, 0), ({"stream_options": {"include_usage": False}}, 0), ({"stream_options": {"include_usage": True}}, 1)],
    ids=["unsaid", "false", "true"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_only_when_asked_for(tiny: Front, path: str, options: dict[str, Any], usage_chunks: int) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "ab"), cached=1)
    _, sse = await stream(tiny, path, {**(CHAT if "chat" in path else COMPLETION), **options})
    with_usage = [e for e in sse.events if e.get("usage") is not None]
    assert len(with_usage) == usage_chunks
    if usage_chunks:
        assert with_usage == [sse.events[-1]]
        assert with_usage[0]["choices"] == []
        prompt = len(tiny.decode.jobs[0].attempt.request.prompt)
        assert with_usage[0]["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 2,
            "total_tokens": prompt + 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert all(e["usage"] is None for e in sse.events[:-1])


async def test_usage_in_every_chunk_counts_up(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, sse = await stream(tiny, "/v1/completions", {**COMPLETION, "stream_options": options})
    assert [e["usage"]["completion_tokens"] for e in sse.events][-1] == 3


async def test_streamed_and_whole_answers_have_one_text(tiny: Front) -> None:
    text = "e\u0301x '\ufe0f 👨\u200d👩\u200d👧 🇫🇷 the Robin"
    ids = ids_of(tiny.model_dir, *text)
    tiny.decode.script = says(*ids)
    _, sse = await stream(tiny, "/v1/completions", {**COMPLETION, "max_tokens": len(ids)})
    whole = await tiny.client.post("/v1/completions", json={**COMPLETION, "max_tokens": len(ids)})
    assert completion_text(sse.events).encode() == text.encode()
    assert whole.json()["choices"][0]["text"].encode() == text.encode()


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_prompt_of_ids_that_ends_inside_a_character(tiny: Front, streamed: bool) -> None:
    backend = Backend.from_file(str(tiny.model_dir / "tokenizer.json"))
    alphabet = byte_alphabet()
    raw = "Good morning 🍋".encode()
    prompt = [backend.token_to_id(alphabet[b]) for b in raw[:-1]]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
    for output, right in ((raw[-1:] + b" hi", "🍋 hi"), (b" hi!", " hi!")):
        tiny.decode.script = says(*(backend.token_to_id(alphabet[b]) for b in output))
        if streamed:
            _, sse = await stream(tiny, "/v1/completions", body)
            assert completion_text(sse.events) == right
        else:
            answer = await tiny.client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == right
    assert tiny.decode.jobs[-1].attempt.request.prompt == tuple(prompt)


async def test_a_begun_stop_string_is_held_back_and_a_whole_one_ends_the_answer(tiny: Front) -> None:
    said = ids_of(tiny.model_dir, "Robin", "!", " ", "Robin", " ", "Robin", ":", " more")

    async def script(job: Job) -> None:
        await job.say(said)
        await job.cancelled.wait()

    tiny.decode.script = script
    body = {**COMPLETION, "max_tokens": 60, "stop": ["\n", "Robin:"]}
    _, sse = await stream(tiny, "/v1/completions", body)
    assert completion_text(sse.events) == "Robin! Robin "
    assert sse.events[-1]["choices"][0]["finish_reason"] == "stop"
    await asyncio.wait_for(tiny.decode.jobs[0].cancelled.wait(), 2)
    told = await asyncio.wait_for(tiny.conductor.finished.get(), 2)
    assert (told.outcome, told.output_tokens) == ("ok", 7)


async def test_min_tokens_outlasts_a_stop_string(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, *"a.b.c."))
    answer = await tiny.client.post("/v1/completions", json={**COMPLETION, "max_tokens": 6, "stop": ".", "min_tokens": 4})
    assert answer.json()["choices"][0]["text"] == "a.b"
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert tiny.decode.jobs[0].attempt.request.sampling.min_tokens == 4


async def test_several_prompts_in_one_request(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.say(job.attempt.request.prompt[-2:], finish=FinishReason.LENGTH)

    tiny.decode.script = script
    body = {"model": "tiny", "prompt": ["xab", "xcd", "xef"], "max_tokens": 2, "stream_options": {"include_usage": True}}
    _, sse = await stream(tiny, "/v1/completions", body)
    assert [completion_text(sse.events[:-1], i) for i in range(3)] == ["ab", "cd", "ef"]
    assert sse.events[-1]["usage"]["completion_tokens"] == 6
    assert len({job.attempt.request.id for job in tiny.decode.jobs}) == 3
    del body["stream_options"]
    whole = (await tiny.client.post("/v1/completions", json=body)).json()
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "ab"), (1, "cd"), (2, "ef")]


async def test_nothing_is_sent_before_the_first_id(tiny: Front) -> None:
    go = asyncio.Event()

    async def script(job: Job) -> None:
        await go.wait()
        await job.say(ids_of(tiny.model_dir, "ok"), finish=FinishReason.LENGTH)

    tiny.decode.script = script
    asked = asyncio.create_task(stream(tiny, "/v1/chat/completions", CHAT))
    await asyncio.wait_for(tiny.decode.arrived.get(), 5)
    assert not (await asyncio.wait({asked}, timeout=0.2))[0]
    go.set()
    _, sse = await asked
    assert chat_text(sse.events) == "ok"


async def test_log_probabilities_in_openai_s_shapes(tiny: Front) -> None:
    ids = ids_of(tiny.model_dir, "Robin", "!")
    odd = Backend.from_file(str(tiny.model_dir / "tokenizer.json")).token_to_id(byte_alphabet()[0xF0])

    async def script(job: Job) -> None:
        assert job.attempt.request.sampling.logprobs == 2
        for i, token in enumerate(ids):
            top = (TopLogprob(token, -0.5), TopLogprob(odd, float("-inf")))
            finish = FinishReason.LENGTH if i else None
            await job.emit(position=i, sampled=Sampled(token, -0.5, top), finish=finish)

    tiny.decode.script = script
    chat = await tiny.client.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2})
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert [(c["token"], c["logprob"], c["bytes"]) for c in content] == [("Robin", -0.5, list(b"Robin")), ("!", -0.5, [33])]
    assert content[0]["top_logprobs"][1] == {"token": "bytes:\\xf0", "logprob": -9999.0, "bytes": [0xF0]}
    plain = await tiny.client.post("/v1/completions", json={**COMPLETION, "logprobs": 2})
    assert plain.json()["choices"][0]["logprobs"] == {
        "tokens": ["Robin", "!"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"Robin": -0.5, "bytes:\\xf0": -9999.0}, {"!": -0.5, "bytes:\\xf0": -9999.0}],
        "text_offset": [0, 5],
    }
    _, sse = await stream(tiny, "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    streamed = [c for e in sse.events for c in ((e["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert streamed == content


async def test_ids_beside_the_text_where_asked_for(tiny: Front) -> None:
    ids = ids_of(tiny.model_dir, "ab")
    tiny.decode.script = says(*ids)
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        whole = (await tiny.client.post(path, json={**body, "return_token_ids": True})).json()["choices"][0]
        assert whole["token_ids"] == ids
        assert tuple(whole["prompt_token_ids"]) == tiny.decode.jobs[-1].attempt.request.prompt
        _, sse = await stream(tiny, path, {**body, "return_token_ids": True})
        assert [i for e in sse.events for i in e["choices"][0].get("token_ids", [])] == ids


async def test_the_prompt_is_echoed_before_the_output(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "the"))
    for prompt in ("once ", ids_of(tiny.model_dir, "once ")):
        body = {"model": "tiny", "prompt": prompt, "echo": True, "max_tokens": 1}
        whole = (await tiny.client.post("/v1/completions", json=body)).json()
        assert whole["choices"][0]["text"] == "once the"
        _, sse = await stream(tiny, "/v1/completions", body)
        assert completion_text(sse.events) == "once the"


async def test_an_error_after_the_first_id_is_the_last_event(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.say(ids_of(tiny.model_dir, "ab"))
        await job.fail(Reason.BUG, "out of luck")

    tiny.decode.script = script
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answer, sse = await stream(tiny, path, body)
        assert not sse.done
        assert sse.events[-1]["error"]["message"] == "out of luck"
        assert sse.events[-1]["error"]["code"] == "internal_error"
        assert all(c["finish_reason"] is None for e in sse.events[:-1] for c in e["choices"])
        assert answer.headers["connection"] == "close"


async def test_the_connection_closes_after_an_error_event(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.say(ids_of(tiny.model_dir, "ab"))
        await job.fail(Reason.BUG)

    tiny.decode.script = script
    url = httpx.URL(tiny.gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    body = b'{"model":"tiny","prompt":"once","stream":true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    raw = await asyncio.wait_for(reader.read(-1), 5)  # to the end of the connection
    writer.close()
    assert raw.endswith(b"\n\n\r\n0\r\n\r\n")
    assert b'"error"' in raw
    assert b"[DONE]" not in raw


async def test_line_separators_of_other_alphabets_stay_inside_their_event(tiny: Front) -> None:
    text = "a\u2028b\u0085c\r\nd\x0be"
    tiny.decode.script = says(*ids_of(tiny.model_dir, *text))
    answer, sse = await stream(tiny, "/v1/completions", {**COMPLETION, "max_tokens": 40})
    assert completion_text(sse.events) == text
    assert answer.content.isascii()


async def test_one_token_prompts_and_one_token_answers(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "the"))
    answer = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": [7], "max_tokens": 1, "seed": 5})
    request = tiny.decode.jobs[0].attempt.request
    assert (request.prompt, request.sampling.seed, request.sampling.max_tokens) == ((7,), 5, 1)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["prompt_tokens"] == 1


@pytest.fixture
async def roomy(tmp_path: Path) -> AsyncIterator[Front]:
    from support.tiny_tokenizer import write_tiny_model

    async with front(write_tiny_model(tmp_path, context=40_000)) as running:
        yield running


async def test_a_long_prompt_is_tokenised_beside_the_event_loop(roomy: Front) -> None:
    roomy.decode.script = says(*ids_of(roomy.model_dir, "the"))
    long = asyncio.create_task(roomy.client.post("/v1/completions", json={**COMPLETION, "prompt": "xyz " * 7_000}))
    short = await roomy.client.post("/v1/completions", json=COMPLETION)
    assert short.status_code == 200
    assert (await long).json()["usage"]["prompt_tokens"] == 28_001
