"""Greedy token ids of a running cluster against the library's own generation, in fp32, with freed memory poisoned.

Cold, warm from device pages, warm from the pool, alone and in a batch: one test per path, the same prompts on each, so that
the library generates once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence

import httpx
import pytest
from support.cluster import LocalCluster, complete
from support.oracle import Oracle
from support.victims import PREFILLS, busy_prefill, live_again

pytestmark = [pytest.mark.model, pytest.mark.computes, pytest.mark.processes, pytest.mark.timeout(600)]

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500)
LONG = 2000
TOKENS = 32
BLOCK = 64


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"{seed}/{length}").randrange(1000, 49000) for _ in range(length)]


def warm_tokens(length: int) -> int:
    """Prompt tokens found in cache the second time: whole blocks, and never the last token."""
    return min(length // BLOCK * BLOCK, length - 1)


async def check_cold_then_warm(cluster: LocalCluster, oracle: Oracle, length: int, workers: Sequence[str]) -> None:
    """Cold, from the device pages of ``workers``, and from the pool once these are gone."""
    ids = prompt(length, seed=1)
    async with cluster.client() as client:
        cold = await complete(client, ids, TOKENS)
        warm = await complete(client, ids, TOKENS)
        assert cold.status == warm.status == 200, (cold.body, warm.body)
        oracle.check(ids, cold.ids, f"cold, {length}")
        oracle.check(ids, warm.ids, f"warm from device pages, {length}")
        assert (cold.cached, warm.cached) == (0, warm_tokens(length))
        if length >= BLOCK:
            cluster.assert_idle()
            cluster.clear_device_pages(*workers)
            pooled = await complete(client, ids, TOKENS)
            oracle.check(ids, pooled.ids, f"warm from the pool, {length}")
            assert pooled.cached == warm_tokens(length)
    cluster.assert_idle()


async def check_batch(cluster: LocalCluster, oracle: Oracle) -> None:
    prompts = [prompt(length, seed=2) for length in (*LENGTHS, *LENGTHS[:-1], 33)]
    assert len(prompts) == 16
    for i, ids in enumerate(prompts):
        ids[0] = 2000 + i  # no two alike
    async with cluster.client() as client:
        answers = await asyncio.gather(*(complete(client, ids, TOKENS) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.body
        oracle.check(ids, answer.ids, f"in a batch of 16, {len(ids)}")


@pytest.mark.parametrize("length", [*LENGTHS, LONG])
async def test_one_process_equals_the_library_cold_and_warm_from_pages_and_pool(
    laptop: LocalCluster, oracle: Oracle, length: int
) -> None:
    await check_cold_then_warm(laptop, oracle, length, ["both-0"])


async def test_one_process_equals_the_library_in_a_batch(laptop: LocalCluster, oracle: Oracle) -> None:
    await check_batch(laptop, oracle)
    laptop.assert_idle()


@pytest.mark.parametrize("length", [*LENGTHS, LONG])
async def test_split_workers_equal_the_library_cold_and_warm_from_pages_and_the_pool_of_the_other_node(
    split: LocalCluster, oracle: Oracle, length: int
) -> None:
    before = split.stats("store-b").numbers["fetch_bytes_out"]
    await check_cold_then_warm(split, oracle, length, [*PREFILLS, "decode-0"])
    if length >= BLOCK:
        assert split.stats("store-b").numbers["fetch_bytes_out"] > before


async def test_split_workers_equal_the_library_in_a_batch(split: LocalCluster, oracle: Oracle) -> None:
    await check_batch(split, oracle)
    split.assert_idle()


async def check_scores(cluster: LocalCluster, oracle: Oracle, prompt: str | list[int], tokens: int) -> None:
    """As evaluation harnesses ask: the prompt echoed with the log-probabilities of its own ids."""
    fields = {"max_tokens": tokens, "echo": True, "logprobs": 1, "return_token_ids": True, "temperature": 0}
    async with cluster.client() as client:
        response = await client.post("/v1/completions", json={"model": "smollm2", "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    ids, lists = choice["prompt_token_ids"], choice["logprobs"]
    assert response.json()["usage"]["completion_tokens"] == tokens
    assert len(lists["token_logprobs"]) == len(lists["text_offset"]) == len(ids) + tokens
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    if len(ids) > 1:
        assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(oracle.logprobs(ids), abs=2e-3)
    if isinstance(prompt, str):
        assert choice["text"].startswith(prompt)
        for token, start in zip(lists["tokens"], lists["text_offset"], strict=True):
            assert choice["text"].startswith(token, start)


SCORED = ("The result is: no", prompt(100, 8), [7])


async def test_one_process_scores_prompts_as_the_library_does_cold_and_cached(laptop: LocalCluster, oracle: Oracle) -> None:
    for one in SCORED:
        for tokens in (0, 1, 0):
            await check_scores(laptop, oracle, one, tokens)
    laptop.assert_idle()


async def test_split_workers_score_prompts_as_the_library_does_cold_and_cached(split: LocalCluster, oracle: Oracle) -> None:
    for one in SCORED:
        for tokens in (0, 1, 0):
            await check_scores(split, oracle, one, tokens)
    split.assert_idle()


ASKED, AT_ONCE, CHOICES = 12, 8, 3


async def test_several_choices_come_from_one_prefill_whether_they_are_read_or_left(split: LocalCluster, oracle: Oracle) -> None:
    turn = asyncio.Semaphore(AT_ONCE)
    chosen: list[tuple[list[int], tuple[int, ...]]] = []

    async def ask(client: httpx.AsyncClient, i: int) -> None:
        """Greedy, drawn, or left after its first chunk."""
        ids, greedy = prompt(70 + i, seed=9), i % 3 == 0
        fields = {"n": CHOICES, "temperature": 0 if greedy else 1, "seed": i, "logprobs": 2, "stream": i % 3 == 2}
        body = {"model": "smollm2", "prompt": ids, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **fields}
        async with turn:
            if fields["stream"]:
                async with client.stream("POST", "/v1/completions", json=body) as left:
                    await anext(left.aiter_lines())
                return
            answer = (await client.post("/v1/completions", json=body)).json()
        outputs = [tuple(choice["token_ids"]) for choice in answer["choices"]]
        assert [choice["index"] for choice in answer["choices"]] == list(range(CHOICES))
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["completion_tokens"] == 8 * CHOICES
        assert len(set(outputs)) == (1 if greedy else CHOICES)
        if greedy:
            chosen.append((ids, outputs[0]))
        elif i < 6:
            alone = await complete(client, ids, 8, temperature=1, seed=i + CHOICES - 1)
            assert alone.ids == outputs[-1]

    before = jobs(split)
    async with split.client() as client:
        await asyncio.gather(*(ask(client, i) for i in range(ASKED)))
    alone = sum(i % 3 == 1 for i in range(6))
    assert jobs(split) - before == ASKED + alone
    split.assert_idle()
    for ids, output in chosen:
        oracle.check(ids, output, f"one of {CHOICES} choices, {len(ids)}")


def jobs(cluster: LocalCluster) -> float:
    """Prompts that prefill workers were asked to compute."""
    return sum(cluster.stats(name).numbers.get("jobs_count", 0) for name in PREFILLS)


async def test_every_byte_between_node_ids_went_by_plain_sockets(split: LocalCluster) -> None:
    async with split.client() as client:
        await complete(client, prompt(200, seed=7), 4)
    split.assert_idle()
    senders = {"prefill-0": "carriers", "prefill-1": "carriers", "store-a": "carriers_sent", "store-b": "carriers_sent"}
    used = {member: split.stats(member).words.get(word, "") for member, word in senders.items()}
    assert any(used.values())
    assert set(used.values()) <= {"", "tcp (tcp)"}, used


async def test_the_agent_kills_a_worker_that_stays_silent_and_its_slots_come_back_by_proof_of_death(
    split: LocalCluster, oracle: Oracle
) -> None:
    long = prompt(1300, seed=60)
    async with split.client() as client:
        task = asyncio.create_task(complete(client, long, 8))
        victim = await busy_prefill(split)
        stopped = split.member(victim)
        os.kill(stopped.pid, signal.SIGSTOP)
        answer = await task
    assert answer.status == 200, answer.body
    oracle.check(long, answer.ids, "after a stop with the agent's kill")
    split.until(lambda: live_again(split, victim, stopped.incarnation), f"{victim} is back", 90)
    split.assert_idle(20)
    numbers = split.stats("store-b").numbers
    assert numbers["slots_fenced"] == 0
    assert numbers["endpoint_remakes"] == 0, "freed by proof of death, not by a new endpoint"
