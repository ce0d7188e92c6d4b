"""What a user's own client sees: the openai package, growing conversations, refusals by target."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.cluster import SPLIT, LocalCluster, complete, running

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.timeout(600)]


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
        for seed in range(12):  # reports to fit the estimates on
            await complete(client, prompt(300 + 60 * seed, seed), 2)
        alone = await complete(client, prompt(600, 90), 2)
        assert alone.status == 200
        load = [asyncio.create_task(complete(client, prompt(1800, 100 + i), 2)) for i in range(8)]
        await asyncio.sleep(1.0)
        target = {"x-ttft-target-ms": "4000"}
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
