"""What a user's own client sees: the openai package, growing conversations, refusals by target."""

from __future__ import annotations

import asyncio
import json
import os
import pickle  # noqa: TID251  to write one; what reads it is the test itself
import random
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import psutil
import pytest
from support.cluster import SPLIT, Answer, LocalCluster, complete, running
from support.split import split_path
from support.victims import PREFILLS, live_again

from moonpool.core.ids import Role
from moonpool.wire import pb

pytestmark = [pytest.mark.model, pytest.mark.computes, pytest.mark.processes, pytest.mark.timeout(600)]

CHUNK, CHUNKS = 256, 10
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    """With what serves by default: bfloat16, and the compiled backend where the CPU has its instructions."""
    settings = {"engine__prefill_chunk": CHUNK}
    with running(LocalCluster(tmp_path_factory.mktemp("serving"), model_dir, SPLIT, **settings)) as cluster:
        yield cluster


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"serving {seed}/{i}").randrange(1000, 49000) for i in range(length)]


async def test_the_openai_client_chats_and_streams_with_usage(cluster: LocalCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        question = "What is the capital of France? Answer in one sentence."
        answer = await client.chat.completions.create(
            model="smollm2", temperature=0, max_tokens=24, messages=[{"role": "user", "content": question}]
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.usage is not None and answer.usage.prompt_tokens > 10
        stream = await client.chat.completions.create(
            model="smollm2",
            temperature=0,
            max_tokens=24,
            messages=[{"role": "user", "content": question}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        async for part in stream:
            usage = part.usage or usage
            text += (part.choices[0].delta.content or "") if part.choices else ""
    assert text == answer.choices[0].message.content
    assert usage is not None and usage.total_tokens == answer.usage.total_tokens
    cluster.assert_idle()


def test_only_those_that_compute_hold_pytorch_in_memory(cluster: LocalCluster) -> None:
    maps = {c.member.role: Path(f"/proc/{c.member.pid}/maps").read_text() for c in cluster.changes().values()}
    assert {role for role, loaded in maps.items() if "libtorch" in loaded} == {Role.PREFILL, Role.DECODE}


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


async def test_the_openai_client_has_tools_called_and_tells_their_results(cluster: LocalCluster) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 120, "tools": [WEATHER]}
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        one = {"tool_choice": "required", "parallel_tool_calls": False}
        answer = (await client.chat.completions.create(messages=messages, **asked, **one)).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls or []
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}  # type: ignore[union-attr]
        name, arguments, finish = "", "", None
        async for part in await client.chat.completions.create(messages=messages, stream=True, **asked, **one):
            finish = part.choices[0].finish_reason or finish
            for delta in part.choices[0].delta.tool_calls or []:
                assert delta.function is not None and delta.index == 0
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (finish, name, arguments) == ("tool_calls", "get_weather", call.function.arguments)  # type: ignore[union-attr]
        messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
        last = (
            await client.chat.completions.create(messages=messages, **{**asked, "tool_choice": "none", "max_tokens": 12})
        ).choices[0]
        assert last.finish_reason in ("stop", "length") and last.message.content and not last.message.tool_calls
    cluster.assert_idle()


async def test_the_openai_client_gets_json_of_its_schema_and_the_same_in_a_stream(cluster: LocalCluster) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {
        "model": "smollm2",
        "temperature": 0,
        "max_tokens": 60,
        "messages": [{"role": "user", "content": "Alice is 30 years old. Give her name and age as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    }
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        answer = (await client.chat.completions.create(**asked)).choices[0]
        assert answer.finish_reason == "stop"
        jsonschema.validate(json.loads(answer.message.content or ""), schema)
        parts = [part async for part in await client.chat.completions.create(**asked, stream=True)]
        assert "".join(p.choices[0].delta.content or "" for p in parts) == answer.message.content
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "format": "none"}}}
        with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema: ") as refused:
            await client.chat.completions.create(**{**asked, "response_format": bad})
        assert refused.value.param == "response_format.json_schema.schema"
    cluster.assert_idle()


async def test_cached_tokens_grow_over_the_turns_of_a_conversation(cluster: LocalCluster) -> None:
    cached: list[int] = []
    messages = [{"role": "user", "content": "Tell me about the phases of the moon. " * 20}]
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="smollm2",
                temperature=0,
                max_tokens=70,
                messages=messages,  # type: ignore[arg-type]
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "Go on, and say more about what you just said, please."})
    assert cached[0] == 0
    assert cached[0] < cached[1] < cached[2], cached
    cluster.assert_idle()


def at_prefill(cluster: LocalCluster) -> list[float]:
    return [cluster.stats(name).numbers["requests_live"] for name in PREFILLS]


def held(cluster: LocalCluster) -> float:
    """Requests that prefill workers have, or that wait for one."""
    return sum(at_prefill(cluster)) + cluster.stats("conductor-0").numbers["waiting"]


ROUNDS = 4


async def report(cluster: LocalCluster, client: httpx.AsyncClient, seed: int) -> None:
    """Prompts for both workers, from short to long, that their estimates are fitted on."""
    for length in (200, 600, 1000, 1500):
        await asyncio.gather(*(complete(client, prompt(length, seed + i), 2) for i in range(len(PREFILLS))))


async def load_every_worker(cluster: LocalCluster, client: httpx.AsyncClient) -> list[asyncio.Task[Answer]]:
    """A long prompt at each prefill worker. Where one is believed to be slow, both wait for the other: it reports anew."""
    for seed in range(1000, 1000 + 10 * ROUNDS, 10):
        load = [asyncio.create_task(complete(client, prompt(2600, seed + i), 2)) for i in range(len(PREFILLS))]
        async with asyncio.timeout(30):
            while await asyncio.to_thread(held, cluster) < len(load):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if all(await asyncio.to_thread(at_prefill, cluster)):
            return load
        await asyncio.gather(*load)
        await report(cluster, client, seed + 5)
    raise AssertionError(f"{ROUNDS} times both prompts were meant for one worker\n{cluster.log()}")


async def test_a_target_that_the_load_would_miss_is_refused_and_accepted_when_idle(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        await report(cluster, client, 80)
        begun = time.monotonic()
        for seed in (89, 90):
            assert (await complete(client, prompt(600, seed), 2)).status == 200
        # Of this machine, as busy as it is: time enough for such a prompt alone, but not behind one of 2,600 tokens.
        target = {"x-ttft-target-ms": str(int(1250 * (time.monotonic() - begun)))}
        load = await load_every_worker(cluster, client)
        before = await asyncio.to_thread(held, cluster)
        refused = await complete(client, prompt(600, 91), 2, headers=target)
        assert refused.status == 429, refused
        assert refused.headers is not None and float(refused.headers["retry-after"]) > 0
        assert held(cluster) <= before, "what is refused waits nowhere"
        await asyncio.gather(*load)
        accepted = await complete(client, prompt(600, 91), 2, headers=target)
        assert accepted.status == 200, accepted.body
    cluster.assert_idle()


async def test_whole_blocks_below_the_last_token_are_cached_and_only_shared_ones(cluster: LocalCluster) -> None:
    ids = prompt(300, 200)
    async with cluster.client() as client:
        cold = await complete(client, ids, 2)
        again = await complete(client, ids, 2)
        shared = await complete(client, [*ids[:192], *prompt(100, 201)], 2)
    assert (cold.cached, again.cached, shared.cached) == (0, 256, 192)
    for answer in (cold, again, shared):
        assert answer.body is not None
    assert again.body["usage"]["prompt_tokens"] == 300
    cluster.assert_idle()


def computed(cluster: LocalCluster) -> float:
    """Tokens of prompts of which every chunk was computed."""
    return sum(cluster.stats(name).numbers["prompt_tokens_count"] for name in PREFILLS)


async def test_a_prompt_of_ten_chunks_is_streamed_after_its_last_one(cluster: LocalCluster) -> None:
    ids, before = prompt(CHUNK * CHUNKS, 500), computed(cluster)
    body = {"model": "smollm2", "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    more = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    text, answered, usage = "", list[int](), None
    async with cluster.client() as client, client.stream("POST", "/v1/completions", json={**body, **more}) as answer:
        lines = [line async for line in only_data(answer.aiter_lines(), cluster, before + len(ids))]
    for part in map(json.loads, lines[:-1]):
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            text += choice["text"]
            answered += choice["token_ids"]
    assert lines[-1] == "[DONE]"
    assert len(answered) == 8 and min(answered) >= 0 and text
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(ids), 8, len(ids) + 8)
    async with cluster.client() as client:
        whole = await complete(client, ids, 8)
    assert whole.ids == tuple(answered) and whole.cached >= len(ids) - 64
    cluster.assert_idle()


async def only_data(lines: AsyncIterator[str], cluster: LocalCluster, after: float) -> AsyncIterator[str]:
    """What the events hold. None of them may have ids before ``after`` tokens of prompts are computed."""
    first = True
    async for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            if first and '"token_ids":[' in data.replace(" ", ""):
                assert await asyncio.to_thread(computed, cluster) >= after, "an answer before its prompt was computed"
                first = False
            yield data
    assert not first


async def test_one_token_prompts_and_answers_are_those_of_one_process(
    cluster: LocalCluster, tmp_path: Path, model_dir: Path
) -> None:
    """Greedy, drawn and penalised: the second id goes on in the random stream of the first, and is penalised for it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_dir.iterdir():
        (folder / file.name).symlink_to(file)
    cases = [
        (prompt(length, 600 + length), {"max_tokens": tokens, "temperature": temperature, "seed": 7, **penalties})
        for length in (1, 70)
        for tokens in (1, 12)
        for temperature in (0.0, 1.0)
        for penalties in ({}, PENALTIES)
    ]
    async with cluster.client() as client:
        got = await asyncio.gather(*(complete(client, ids, 12, **sampling) for ids, sampling in cases))
    assert [answer.status for answer in got] == [200] * len(cases)
    engine = {"block_tokens": 64, "backend": "auto"}
    async with split_path(tmp_path, folder, prefills=0, slots=16, dtype="bfloat16", **engine) as both:
        wanted = await asyncio.gather(
            *(both.gateway.ask(both.asker.request(ids, ignore_eos=True, **sampling)) for ids, sampling in cases)
        )
        assert cluster.member("decode-0").details["engine"] == both.decode_engine.backend_name
        await both.idle()
    assert [list(answer.ids) for answer in got] == [answer.ids for answer in wanted]
    assert all(len(answer.ids) == sampling["max_tokens"] for answer, (_, sampling) in zip(got, cases, strict=True))
    assert len({answer.ids for answer in got if len(answer.ids) > 1}) == len(cases) // 2, (
        "temperature and penalties change them"
    )
    cluster.assert_idle()


class _Marker:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def listening(cluster: LocalCluster) -> tuple[set[tuple[str, int]], set[str]]:
    """TCP addresses and unix sockets that the cluster's processes listen on."""
    ports: set[tuple[str, int]] = set()
    assert cluster._process is not None
    top = psutil.Process(cluster._process.pid)
    for process in [top, *top.children(recursive=True)]:
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                ports.add((one.laddr.ip.removeprefix("::ffff:"), one.laddr.port))
    sockets = {str(path) for path in (cluster.folder / "state").rglob("*") if path.is_socket()}
    return ports, sockets


def send(family: int, address: Any, *messages: bytes) -> None:
    """Whatever the other end thinks of it."""
    for message in messages:
        with socket.socket(family) as line:
            line.settimeout(1.0)
            try:
                line.connect(address)
                line.sendall(message)
                line.shutdown(socket.SHUT_WR)
                while line.recv(4096):
                    pass
            except OSError:
                pass


def rpc_methods() -> list[str]:
    modules = [getattr(pb, name) for name in pb.__all__ if not name.endswith("_rpc")]
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


async def test_a_store_node_that_is_stopped_leaves_its_blocks_to_the_other_and_comes_back_empty(cluster: LocalCluster) -> None:
    ids = prompt(700, 400)
    async with cluster.client() as client:
        first = await complete(client, ids, 4)
        cluster.assert_idle()
        before = cluster.member("store-b")
        elsewhere = cluster.stats("store-a").numbers["blocks_findable"]
        os.kill(before.pid, signal.SIGTERM)
        cluster.until(
            lambda: live_again(cluster, "store-b", before.incarnation) and cluster.stats("decode-0").numbers["store_connected"],
            "store-b is back and its decode worker connected",
            60,
        )
        assert cluster.stats("store-a").numbers["blocks_findable"] >= elsewhere + 10
        assert cluster.stats("store-b").numbers["blocks_findable"] == 0
        cluster.clear_device_pages("prefill-0", "prefill-1", "decode-0")
        again = await complete(client, ids, 4)
    assert (first.cached, again.cached) == (0, 640)
    cluster.assert_idle()


async def test_pickles_sent_to_everything_that_listens_run_nothing_and_stop_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    bomb = pickle.dumps(_Marker(marker))
    http = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(bomb)
    messages = (bomb, struct.pack(">I", len(bomb)) + bomb, struct.pack("<Q", len(bomb)) + bomb, http + bomb)
    ports, sockets = listening(cluster)
    assert len(ports) >= 7, "registry, gateway and a port of every member"
    assert {ip for ip, _ in ports} == {"127.0.0.1"}, "nothing listens beyond this machine unless it is told to"
    before = {name: change.member.incarnation for name, change in cluster.changes().items()}
    for address in ports:
        await asyncio.to_thread(send, socket.AF_INET, address, *messages)
    for path in sockets:
        await asyncio.to_thread(send, socket.AF_UNIX, path, *messages)
    refused = 0
    for member in (change.member for change in cluster.changes().values()):
        async with grpc.aio.insecure_channel(member.address) as channel:
            for method in rpc_methods():
                try:
                    await channel.unary_unary(method)(bomb, timeout=0.5)
                except grpc.aio.AioRpcError:
                    refused += 1
    assert refused > 0
    assert not marker.exists()
    async with cluster.client() as client:
        assert (await complete(client, prompt(100, 300), 2)).status == 200
    assert {name: change.member.incarnation for name, change in cluster.changes().items()} == before, "nobody died of it"
    cluster.assert_idle()
    pickle.loads(bomb)  # noqa: S301
    assert marker.exists(), "it would have made its mark"
