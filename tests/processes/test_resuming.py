"""Workers and store nodes killed or stopped under answers that are being given: every answer ends as if nothing was."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from support.cluster import Answer, LocalCluster, complete, running
from support.oracle import Oracle
from support.steady_load import SteadyLoad

from moonpool.bench.tiny_model import TINY_IDS
from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

NODES = [
    {"name": "a", "prefill": 2},
    {"name": "b", "decode": 1},
    {"name": "c", "decode": 1, "conductor": 1, "gateway": 1},
]
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
BLOCK = 16


@pytest.fixture(scope="module")
def tiny_oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalCluster]:
    """Two of each kind of worker, fp32. Heartbeats may be late on a busy machine without anybody being called silent."""
    settings = {
        "model__dtype": "float32",
        "engine__block_tokens": BLOCK,
        "store__pool_bytes": 64 << 20,
        "timing__silent_after_ms": 3_000,
        "timing__kill_after_ms": 3_000,
    }
    with running(LocalCluster(tmp_path_factory.mktemp("twins"), tiny_model, NODES, **settings)) as cluster:
        yield cluster


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(TINY_IDS), k=length)


def counted(cluster: LocalCluster, name: str, members: Sequence[str]) -> float:
    return sum(numbers.get(f"{name}_count", 0.0) for numbers in numbers_of(cluster, members).values())


def numbers_of(cluster: LocalCluster, members: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of these alone: asking every process takes so long on a busy machine that answers end meanwhile."""
    return {name: dict(cluster.stats(name).numbers) for name in members}


def whole_again(cluster: LocalCluster) -> bool:
    changes = cluster.changes().values()
    return all(change.liveness is Liveness.LIVE and change.member.ready for change in changes)


async def asked(cluster: LocalCluster, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    async with cluster.client() as client:
        return list(await asyncio.gather(*(complete(client, ids, tokens) for ids in prompts)))


async def probed(addresses: Sequence[str], during: asyncio.Task[list[Answer]]) -> list[int]:
    """What ``/live`` of these processes says, five times a second."""
    said = []
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        while not during.done():
            said += [(await client.get(f"http://{address}/live")).status_code for address in addresses]
            await asyncio.sleep(0.2)
    return said


@asynccontextmanager
async def under_way(
    cluster: LocalCluster, prompts: Sequence[list[int]], tokens: int
) -> AsyncIterator[asyncio.Task[list[Answer]]]:
    """While all of ``prompts`` are being answered: some blocks of every answer are there on average."""
    before = counted(cluster, "tokens", DECODES)
    task = asyncio.create_task(asked(cluster, prompts, tokens))
    try:
        until = time.monotonic() + 60
        while counted(cluster, "tokens", DECODES) - before < len(prompts) * 3 * BLOCK:
            assert time.monotonic() < until and not task.done(), cluster.log()
            await asyncio.sleep(0.01)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check(oracle: Oracle, prompts: Sequence[list[int]], answers: Sequence[Answer], tokens: int) -> None:
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.body
        assert len(answer.ids) == tokens
        oracle.check_at_once(ids, answer.ids, f"prompt of {len(ids)}")


def busiest(cluster: LocalCluster, names: Sequence[str], gauge: str) -> str:
    numbers = numbers_of(cluster, names)
    return max(names, key=lambda name: numbers[name].get(gauge, 0.0))


STRIKES = 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_answers_of_a_lost_decode_worker_go_on_as_if_nothing_was(
    twins: LocalCluster, tiny_oracle: Oracle, how: signal.Signals
) -> None:
    for strike in range(STRIKES):
        if await _lost_while_answers_run(twins, tiny_oracle, how, 1_000 * strike):
            return
    raise AssertionError(f"{STRIKES} times all answers had ended before their worker was lost")


async def _lost_while_answers_run(twins: LocalCluster, tiny_oracle: Oracle, how: signal.Signals, seed: int) -> bool:
    """Whether the blow came in time: then some prompt was fetched or computed again, as the conductor chose."""
    tokens, prompts = 900, [prompt(n, seed=seed + 100 * how + n) for n in (15, 16, 17, 40, 47, 48, 49, 70)]
    twins.until(lambda: whole_again(twins), "everybody is there", 120)
    asked_for = counted(twins, "prompt_tokens", PREFILLS) + sum(map(len, prompts))
    lives = {name: twins.member(name) for name in DECODES}
    async with under_way(twins, prompts, tokens) as answers:
        victim = lives[busiest(twins, DECODES, "requests_live")]
        os.kill(victim.pid, how)  # at once: they take a second or two on a fast machine
        try:
            check(tiny_oracle, prompts, await answers, tokens)
        finally:
            if how is signal.SIGSTOP:
                with suppress(ProcessLookupError):  # who finds it silent for long kills it, too
                    os.kill(victim.pid, signal.SIGKILL)

    def back() -> bool:
        return whole_again(twins) and twins.member(victim.id).incarnation > victim.incarnation

    twins.until(back, f"{victim.id} is back", 120)
    twins.assert_idle(20)
    return counted(twins, "prompt_tokens", PREFILLS) > asked_for


async def test_twenty_prompts_of_a_killed_prefill_worker_are_computed_by_the_other_and_answers_under_way_go_on(
    twins: LocalCluster, tiny_oracle: Oracle
) -> None:
    twins.until(lambda: whole_again(twins), "everybody is there", 120)
    running_ones = [prompt(20, seed=s) for s in range(2)]
    prompts = [prompt(700, seed=s) for s in range(10, 30)]
    async with under_way(twins, running_ones, 400) as answers:
        lives = {name: twins.member(name).incarnation for name in DECODES}
        more = asyncio.create_task(asked(twins, prompts, 2))
        alive = asyncio.create_task(probed([twins.member(name).details["probe"] for name in DECODES], more))
        victim = busiest(twins, PREFILLS, "requests_live")
        os.kill(twins.member(victim).pid, signal.SIGKILL)
        check(tiny_oracle, prompts, await more, 2)
        check(tiny_oracle, running_ones, await answers, 400)
        assert set(await alive) == {200}
        assert {name: twins.member(name).incarnation for name in DECODES} == lives
        assert all(twins.changes()[name].liveness is Liveness.LIVE for name in DECODES)
    twins.until(lambda: whole_again(twins), f"{victim} is back", 120)
    twins.assert_idle(20)


async def test_a_worker_of_each_kind_killed_in_turn_under_steady_load_costs_no_request(
    twins: LocalCluster, tiny_oracle: Oracle
) -> None:
    twins.until(lambda: whole_again(twins), "everybody is there", 120)
    prompts = [tuple(prompt(60 + 40 * (s % 3), seed=s)) for s in range(70, 78)]
    load = SteadyLoad(lambda: [twins.url], prompts, tokens=40)
    loading = asyncio.create_task(load.run())
    for kind in (PREFILLS, DECODES):
        served = len(load.answers)
        await asyncio.to_thread(twins.until, lambda n=served: len(load.answers) > n + 4, "answers flow", 60)
        victim = await asyncio.to_thread(busiest, twins, kind, "requests_live")
        os.kill(twins.member(victim).pid, signal.SIGKILL)
        await asyncio.to_thread(twins.until, lambda: whole_again(twins), f"{victim} is back", 120)
    load.enough.set()
    await loading
    assert not load.lost, load.lost
    assert load.counts["streamed"] and load.counts["whole"]
    for asked_for, ids in set(load.answers):
        assert len(ids) == 40
        tiny_oracle.check_at_once(list(asked_for), ids, "while workers were killed")
    await asyncio.to_thread(twins.assert_idle, 20)


async def test_without_its_store_node_a_decode_worker_finishes_and_new_prompts_land_elsewhere(
    twins: LocalCluster, tiny_oracle: Oracle
) -> None:
    twins.until(lambda: whole_again(twins), "everybody is there", 120)
    old, new = [prompt(30, seed=s) for s in range(40, 44)], [prompt(90, seed=s) for s in range(50, 58)]
    async with under_way(twins, old, 400) as answers:
        os.kill(twins.member("store-b").pid, signal.SIGKILL)
        check(tiny_oracle, new, await asked(twins, new, 20), 20)
        check(tiny_oracle, old, await answers, 400)
    twins.until(lambda: whole_again(twins), "store-b is back", 120)
    twins.until(lambda: twins.stats("decode-0").numbers["store_connected"], "decode-0 has joined it", 30)
    twins.assert_idle(20)
