"""Real processes killed and stopped while they work: what clients see, what is left, and that no byte changes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.cluster import SPLIT, Answer, LocalCluster, complete, running
from support.oracle import Oracle
from support.victims import PREFILLS, busy_prefill, live_again

from moonpool.wire import pb

pytestmark = [pytest.mark.model, pytest.mark.computes, pytest.mark.processes, pytest.mark.timeout(600)]

TOKENS = 8
LONG = 1300  # tokens: seconds of computing


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"failure {seed}").randrange(1000, 49000) for _ in range(1)] + [
        random.Random(f"{seed}/{i}").randrange(1000, 49000) for i in range(length - 1)
    ]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    """The agent's kill is off: a stopped process stays stopped."""
    folder = tmp_path_factory.mktemp("failing")
    settings = {"model__dtype": "float32", "timing__kill_after_ms": 0}
    with running(LocalCluster(folder, model_dir, SPLIT, **settings)) as cluster:
        yield cluster


@asynccontextmanager
async def asked(cluster: LocalCluster, prompts: list[list[int]]) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    async with cluster.client() as client:
        tasks = [asyncio.create_task(complete(client, ids, TOKENS)) for ids in prompts]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def check_all(oracle: Oracle, prompts: list[list[int]], tasks: list[asyncio.Task[Answer]], what: str) -> None:
    for ids, answer in zip(prompts, await asyncio.gather(*tasks), strict=True):
        assert answer.status == 200, answer.body
        oracle.check(ids, answer.ids, what)


async def test_requests_of_a_killed_prefill_worker_finish_on_the_other_one_and_it_comes_back(
    cluster: LocalCluster, oracle: Oracle
) -> None:
    first = [prompt(200, seed) for seed in range(30, 33)]  # every lazy connection is there from now on
    async with asked(cluster, first) as tasks:
        await check_all(oracle, first, tasks, "before the kill")
    cluster.assert_idle()
    handles = cluster.handles()
    prompts = [prompt(700, seed) for seed in range(4)]
    async with asked(cluster, prompts) as tasks:
        victim = await busy_prefill(cluster)
        before = cluster.member(victim)
        os.kill(before.pid, signal.SIGKILL)
        await check_all(oracle, prompts, tasks, "after a kill")
    cluster.until(lambda: live_again(cluster, victim, before.incarnation), f"{victim} is back", 90)
    cluster.assert_idle(20)
    fresh = [prompt(300, seed) for seed in range(20, 28)]
    async with asked(cluster, fresh) as tasks:
        await check_all(oracle, fresh, tasks, "after the restart")
    cluster.assert_idle()

    def grown() -> dict[str, object]:
        now = cluster.handles(victim)
        return {m: (handles[m], now[m]) for m in now if now[m][0] > handles[m][0] + 1 or now[m][1] > handles[m][1] + 1}

    cluster.until(lambda: not grown(), f"threads and sockets of the others are back: {grown()}", 15)
    assert cluster.stats(victim).numbers["pages_cached"] > 0, f"{victim} computed nothing after its return"


async def test_slots_of_a_stopped_prefill_worker_stay_fenced_until_the_endpoint_is_made_anew(
    cluster: LocalCluster, oracle: Oracle
) -> None:
    long = prompt(LONG, seed=50)
    async with asked(cluster, [long]) as tasks:
        victim = await busy_prefill(cluster)
        other = next(name for name in PREFILLS if name != victim)
        stopped = cluster.member(victim)
        os.kill(stopped.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            while not cluster.stats(other).numbers["requests_running"]:
                assert time.monotonic() < began + 10, cluster.log()
                await asyncio.sleep(0.02)
            print(f"the next attempt's prefill began {time.monotonic() - began:.2f} s after the stop")
            await check_all(oracle, [long], tasks, "after a stop")
            fenced = cluster.stats("store-b").numbers["slots_fenced"]
            assert fenced > 0
            await asyncio.sleep(2)
            assert cluster.stats("store-b").numbers["slots_fenced"] == fenced, "freed without proof"
            with grpc.insecure_channel(cluster.member("store-b").address) as channel:
                pb.store_rpc.StoreStub(channel).RemakeEndpoint(pb.types.Empty(), timeout=10)
            assert cluster.stats("store-b").numbers["slots_fenced"] == 0
            again = prompt(LONG, seed=51)
            async with asked(cluster, [again]) as more:
                await check_all(oracle, [again], more, "in slots that were fenced")
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
    cluster.until(lambda: live_again(cluster, victim, stopped.incarnation), f"{victim} is back as a new life", 90)
    cluster.assert_idle(20)
    cluster.clear_device_pages(*PREFILLS, "decode-0")
    async with asked(cluster, [long, again]) as tasks:
        await check_all(oracle, [long, again], tasks, "from the pool, after the stopped worker woke")
        assert all(task.result().cached >= LONG - 100 for task in tasks)
    assert cluster.stats("store-b").numbers["digest_mismatches"] == 0


async def test_a_disconnected_client_leaves_nothing_behind(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        for wait_s in (0.05, 0.3, 0.8, 1.5):
            task = asyncio.create_task(complete(client, prompt(900, seed=70), 400))
            await asyncio.sleep(wait_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    cluster.assert_idle(5)
