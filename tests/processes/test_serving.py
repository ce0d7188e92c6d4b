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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import openai
import psutil
import pytest
from support.cluster import SPLIT, Answer, LocalCluster, complete, running

from moonpool.core.membership import Liveness
from moonpool.wire import pb

pytestmark = [pytest.mark.model, pytest.mark.computes, pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    with running(LocalCluster(tmp_path_factory.mktemp("serving"), model_dir, SPLIT)) as cluster:
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


async def test_a_target_that_the_load_would_miss_is_refused_and_accepted_when_idle(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        for seed in range(9):  # reports to fit the estimates on
            await complete(client, prompt(300 + 60 * seed, seed), 2)
        begun = time.monotonic()
        for seed in (89, 90):
            assert (await complete(client, prompt(600, seed), 2)).status == 200
        # Of this machine, as busy as it is: time enough for such a prompt alone, but not behind one of 4,000 tokens.
        target = {"x-ttft-target-ms": str(int(1250 * (time.monotonic() - begun)))}
        # At each prefill worker: what waits behind them would be passed by a shorter prompt with a target.
        load: list[asyncio.Task[Answer]] = []
        async with asyncio.timeout(60):
            while not all(cluster.stats(name).numbers["requests_live"] for name in ("prefill-0", "prefill-1")):
                if sum(not task.done() for task in load) < 2:
                    load.append(asyncio.create_task(complete(client, prompt(4000, 100 + len(load)), 2)))
                await asyncio.sleep(0.02)
        before = sum(cluster.stats(name).numbers["requests_live"] for name in ("prefill-0", "prefill-1"))
        refused = await complete(client, prompt(600, 91), 2, headers=target)
        assert refused.status == 429, refused
        assert refused.headers is not None and float(refused.headers["retry-after"]) > 0
        assert sum(cluster.stats(name).numbers["requests_live"] for name in ("prefill-0", "prefill-1")) <= before
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


def live_again(cluster: LocalCluster, name: str, incarnation: int) -> bool:
    change = cluster.changes()[name]
    return change.liveness is Liveness.LIVE and change.member.incarnation > incarnation and change.member.ready


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
