"""The gateway as a process's service: ports, readiness, metrics, leaving."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from pathlib import Path

import openai
import pytest
from support.gateway_front import HASH_KEY, Front, eventually, front, says, settings_for, silence
from support.scripted_cluster import LAYOUT, Job, Membership, prefill_member
from support.strict_sse import parsed
from support.tiny_tokenizer import CONTEXT, ids_of, write_tiny_model

from moonpool.cluster.gateway import Gateway
from moonpool.core.blocks import BlockHasher, namespace
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness
from moonpool.core.request import FinishReason

BODY = {"model": "tiny", "prompt": "once", "max_tokens": 20}


@pytest.fixture
async def client(tiny: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{tiny.gateway.url}/v1", api_key="none", http_client=tiny.client, max_retries=0)


async def test_the_openai_client_lists_chats_completes_and_streams(tiny: Front, client: openai.AsyncOpenAI) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "hello"), cached=4)
    assert [m.id async for m in await client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=9)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "hello"
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 4
    stream = await client.chat.completions.create(
        model="tiny",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    completion = await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5)
    assert completion.choices[0].text == "hello"


async def test_the_openai_client_raises_the_right_errors(tiny: Front, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model="tiny", prompt="x", temperature=9)
    assert (e.value.param, e.value.code) == ("temperature", "invalid_request")


async def test_an_error_inside_a_stream_reaches_the_openai_client(tiny: Front, client: openai.AsyncOpenAI) -> None:
    async def script(job: Job) -> None:
        await job.say(ids_of(tiny.model_dir, "a"))
        await job.emit(position=7, finish=FinishReason.LENGTH)

    tiny.decode.script = script
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="missing"):
        [chunk async for chunk in stream]


async def test_ready_names_what_is_missing(tiny: Front) -> None:
    assert (await tiny.client.get("/ready")).status_code == 200
    for role in (Role.CONDUCTOR, Role.DECODE, Role.PREFILL, Role.STORE):
        (member,) = tiny.membership.live(role)
        tiny.membership.say(member, Liveness.GONE, "killed")
        answer = await tiny.client.get("/ready")
        assert (answer.status_code, answer.json()["missing"]) == (503, [role])
        assert (await tiny.client.get("/health")).status_code == 200
        tiny.membership.say(member)
    assert (await tiny.client.get("/ready")).status_code == 200


async def test_models_says_the_context(tiny: Front) -> None:
    (card,) = (await tiny.client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", CONTEXT)
    assert (await tiny.client.get("/v1/models/tiny")).json() == card


async def test_every_prompt_is_hashed_as_workers_hash_it(tiny: Front) -> None:
    tiny.decode.script = says(9)
    await tiny.client.post("/v1/completions", json={**BODY, "prompt": list(range(4, 54))})
    request = tiny.decode.jobs[0].attempt.request
    space = namespace(LAYOUT)
    assert request.namespace == space
    assert list(request.keys) == BlockHasher(HASH_KEY, space, 16).keys(range(4, 54))
    assert len(request.keys) == 3
    assert tiny.conductor.placed[0].keys == request.keys


async def test_a_seed_is_drawn_where_none_is_given(tiny: Front) -> None:
    tiny.decode.script = says(9)
    for seed in (None, None, -1):
        await tiny.client.post("/v1/completions", json={**BODY, "seed": seed})
    seeds = [job.attempt.request.sampling.seed for job in tiny.decode.jobs]
    assert len(set(seeds)) == 3
    assert seeds[2] == 2**64 - 1


async def test_metrics_have_bounded_labels_and_count_what_happened(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"), cached=2)
    for name in ("x" * 50, "y" * 50):
        await tiny.client.post("/v1/completions", json={**BODY, "model": name})
    await tiny.client.post("/v1/completions", json=BODY)
    text = (await tiny.client.get("/metrics")).text
    assert "xxx" not in text
    for line in (
        'moonpool_gateway_requests_total{endpoint="completions",model="",outcome="unknown_model"} 2.0',
        'moonpool_gateway_requests_total{endpoint="completions",model="tiny",outcome="ok"} 1.0',
        'moonpool_gateway_output_tokens_total{model="tiny"} 3.0',
        'moonpool_gateway_cached_tokens_total{model="tiny"} 2.0',
        'moonpool_gateway_prompt_tokens_total{model="tiny"} 5.0',
        "moonpool_gateway_attempts_total 1.0",
        "moonpool_gateway_in_flight 0.0",
        'moonpool_gateway_ttft_seconds_count{model="tiny"} 1.0',
        'moonpool_gateway_tpot_seconds_count{model="tiny"} 1.0',
    ):
        assert line in text


async def test_the_openapi_document_describes_the_bodies(tiny: Front) -> None:
    document = (await tiny.client.get("/openapi.json")).json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["messages"]["items"]["properties"]["role"]["enum"]
    assert "$ref" not in str(schema)


async def test_a_taken_port_is_named(tiny_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = settings_for(tiny_dir, {"gateway": {"port": port}})
        with pytest.raises(ConfigError, match=str(port)) as e:
            await Gateway.start(settings, prefill_member(), Membership(), HASH_KEY, tiny_dir)
        assert e.value.param == "gateway.port"


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
async def test_a_model_directory_that_lacks_a_file_is_named_and_the_port_is_free_again(tmp_path: Path, missing: str) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / missing).unlink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = settings_for(folder, {"gateway": {"port": port}})
    with pytest.raises(ConfigError, match=folder.name):
        await Gateway.start(settings, prefill_member(), Membership(), HASH_KEY, folder)
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


async def test_a_leaving_gateway_finishes_what_runs_and_refuses_what_comes(tiny: Front) -> None:
    go = asyncio.Event()

    async def script(job: Job) -> None:
        await job.say(ids_of(tiny.model_dir, "a"))
        await go.wait()
        await job.say(ids_of(tiny.model_dir, "b"), position=1, finish=FinishReason.LENGTH)

    tiny.decode.script = script
    running = asyncio.create_task(tiny.client.post("/v1/completions", json={**BODY, "stream": True}))
    await asyncio.wait_for(tiny.decode.arrived.get(), 5)
    leaving = asyncio.create_task(tiny.leave())
    await asyncio.sleep(0)  # close has begun
    refused = await tiny.client.post("/v1/completions", json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_path")
    assert (await tiny.client.get("/ready")).json()["missing"] == ["gateway"]
    go.set()
    assert parsed((await running).content).done
    await asyncio.wait_for(leaving, 5)


async def test_a_leaving_gateway_ends_what_does_not_finish_with_an_error_event(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"gateway": {"drain_ms": 100}}) as tiny:

        async def script(job: Job) -> None:
            await job.say(ids_of(tiny_dir, "a"))
            await job.cancelled.wait()

        tiny.decode.script = script
        running = asyncio.create_task(tiny.client.post("/v1/completions", json={**BODY, "stream": True}))
        await asyncio.wait_for(tiny.decode.arrived.get(), 5)
        await eventually(lambda: tiny.gateway.numbers()["requests_in_flight"])
        await asyncio.wait_for(tiny.leave(), 5)
        sse = parsed((await running).content)
        assert not sse.done
        assert sse.events[-1]["error"]["code"] == "no_path"


async def test_nothing_is_left_behind(tiny_dir: Path) -> None:
    before_threads, before_tasks = set(threading.enumerate()), len(asyncio.all_tasks())
    async with front(tiny_dir) as tiny:
        tiny.decode.script = silence
        asked = [asyncio.create_task(tiny.client.post("/v1/completions", json=BODY)) for _ in range(5)]
        for _ in asked:
            await asyncio.wait_for(tiny.decode.arrived.get(), 5)
        for one in asked:
            one.cancel()
        await eventually(lambda: all(job.cancelled.is_set() for job in tiny.decode.jobs))
        url = tiny.gateway.url
    gc.collect()
    assert {t for t in threading.enumerate() if "gateway" in t.name} <= before_threads
    await eventually(lambda: len(asyncio.all_tasks()) <= before_tasks)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rsplit(":", 1)[1]))) != 0
