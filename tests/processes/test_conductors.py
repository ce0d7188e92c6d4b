"""Real conductors killed and stopped while requests come in, and what is left of clients that leave whenever they like."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import LocalCluster, complete, running
from support.victims import live_again

from moonpool.bench.tiny_model import TINY_IDS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

NODES = [{"name": "a", "prefill": 2}, {"name": "b", "decode": 1, "conductor": 2, "gateway": 1}]
CONDUCTORS = ("conductor-0", "conductor-1")


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"conductors {seed}/{i}").randrange(TINY_IDS) for i in range(length)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalCluster]:
    """The agent's kill is off: a stopped process stays stopped."""
    settings = {"timing__kill_after_ms": 0, "store__pool_bytes": 64 << 20, "engine__page_bytes": 32 << 20}
    with running(LocalCluster(tmp_path_factory.mktemp("conductors"), tiny_model, NODES, **settings)) as cluster:
        yield cluster


def placing(cluster: LocalCluster) -> str:
    """The conductor that the gateway asks."""
    return max(CONDUCTORS, key=lambda name: cluster.stats(name).numbers["placements"])


def knows_all_blocks(cluster: LocalCluster, name: str) -> bool:
    """It believes what the other one does, who slept through nothing. A block that both pools hold is one in the index."""
    pools = [cluster.stats(store).numbers["blocks_findable"] for store in ("store-a", "store-b")]
    mine, others = (cluster.stats(one).numbers["blocks_indexed"] for one in (name, *(set(CONDUCTORS) - {name})))
    return mine == others and 0 < max(pools) <= mine <= sum(pools)


def held(cluster: LocalCluster, conductor: str) -> dict[str, float]:
    """What it believes to be under way; bookings end by the next reports."""
    numbers = cluster.stats(conductor).numbers
    names = ("bookings", "waiting", "booked_prefill_seconds", "attempts_reported")
    return {name: numbers[name] for name in names if numbers[name]}


async def test_requests_keep_flowing_when_the_conductor_is_killed_and_the_next_one_knows_every_block(
    cluster: LocalCluster,
) -> None:
    async with cluster.client() as client:
        for seed in range(4):
            assert (await complete(client, prompt(200, seed), 2)).status == 200
        victim = placing(cluster)
        before = cluster.member(victim)
        under_way = [asyncio.create_task(complete(client, prompt(600, 10 + i), 400)) for i in range(6)]
        await asyncio.sleep(0.3)
        os.kill(before.pid, signal.SIGKILL)
        began = time.monotonic()
        after = await complete(client, prompt(200, 0), 2)
        print(f"the first request after the kill was answered {time.monotonic() - began:.2f} s later")
        assert after.status == 200
        assert all(answer.status == 200 for answer in await asyncio.gather(*under_way))
        assert after.cached == 192, "the other conductor and the workers know the blocks of before"
    await asyncio.to_thread(cluster.until, lambda: live_again(cluster, victim, before.incarnation), f"{victim} is back", 60)
    await asyncio.to_thread(cluster.until, lambda: knows_all_blocks(cluster, victim), f"{victim} knows every block")
    cluster.assert_idle(20)


async def test_a_conductor_that_slept_through_stores_and_evictions_believes_the_truth_again(cluster: LocalCluster) -> None:
    sleeper = placing(cluster)
    pid = cluster.member(sleeper).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        async with cluster.client() as client:
            answers = await asyncio.gather(*(complete(client, prompt(500, 30 + i), 2) for i in range(4)))
            assert [answer.status for answer in answers] == [200] * 4, "the other conductor serves meanwhile"
    finally:
        os.kill(pid, signal.SIGCONT)
    await asyncio.to_thread(cluster.until, lambda: knows_all_blocks(cluster, sleeper), f"{sleeper} knows every block", 30)
    cluster.assert_idle(20)


async def test_nothing_stays_booked_or_queued_after_clients_that_leave_at_random_times(cluster: LocalCluster) -> None:
    seen = random.Random(5)
    async with cluster.client() as client:
        asked = []
        for i in range(40):
            asked.append(asyncio.create_task(complete(client, prompt(seen.choice((20, 150, 400)), 100 + i), 4)))
            if seen.random() < 0.7:
                asyncio.get_running_loop().call_later(seen.uniform(0.0, 0.2), asked[-1].cancel)
            await asyncio.sleep(0.02)
        ends = await asyncio.gather(*asked, return_exceptions=True)
    answered = [end for end in ends if not isinstance(end, BaseException)]
    assert all(answer.status == 200 for answer in answered)
    assert len(answered) < len(ends), "some were cancelled"
    cluster.assert_idle(20)
    await asyncio.to_thread(cluster.until, lambda: not any(held(cluster, name) for name in CONDUCTORS), "nothing is held", 20)
