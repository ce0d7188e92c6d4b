"""Real processes prefill one long prompt together, placed by the conductor; one of them is killed meanwhile."""

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
from support.oracle import Oracle

LONG = bool(os.environ.get("MOONPOOL_LONG_TESTS"))
pytestmark = [
    *(pytest.mark.model, pytest.mark.computes, pytest.mark.processes, pytest.mark.timeout(600)),
    pytest.mark.skipif(not LONG, reason="a cluster of its own, and minutes"),
]
NODES = [
    *({"name": name, "prefill": 1} for name in "ab"),
    {"name": "c", "decode": 1, "conductor": 1, "gateway": 1},
]
PREFILLS = ("prefill-0", "prefill-1")
TOKENS = 8
POLICY = '{"group": 2, "group_least_s": 0.1, "group_gain_s": 0.01}'


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(f"group {seed}").choices(range(1_000, 49_000), k=length)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[LocalCluster]:
    settings = {"model__dtype": "float32", "engine__threads": 1, "scheduler__policy_settings": POLICY}
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MOONPOOL_LONG_TESTS")  # no name that a cluster knows
        with running(LocalCluster(tmp_path_factory.mktemp("group"), model_dir, NODES, **settings)) as cluster:
            yield cluster


def sent(cluster: LocalCluster, name: str) -> float:
    """Of both prefill workers."""
    numbers = cluster.numbers()
    return sum(numbers[worker].get(name, 0.0) for worker in PREFILLS if worker in numbers)


async def test_a_long_prompt_is_prefilled_by_both_workers_and_survives_the_loss_of_one(
    cluster: LocalCluster, oracle: Oracle
) -> None:
    async with cluster.client() as client:
        for seed, length in enumerate((300, 900, 600)):  # what a prompt costs is known from then on
            ids = prompt(length, seed)
            oracle.check(ids, (await complete(client, ids, TOKENS)).ids, "alone")
        for seed in (10, 11):
            before = sent(cluster, "span_tokens_count")
            ids = prompt(1_500, seed)
            answer = await complete(client, ids, TOKENS)
            assert answer.status == 200, answer.body
            oracle.check(ids, answer.ids, "by a group")
            assert answer.cached == 0
            assert sent(cluster, "span_tokens_count") > before, cluster.log()
        cluster.assert_idle()
        ids = prompt(1_500, 12)
        task = asyncio.create_task(complete(client, ids, TOKENS))
        victim = cluster.member(await helping(cluster))
        os.kill(victim.pid, signal.SIGKILL)
        answer = await task
        assert answer.status == 200, answer.body
        oracle.check(ids, answer.ids, "after the helper was killed")
        assert sent(cluster, "spans_alone_count") == 1
    cluster.until(lambda: cluster.changes()[victim.id].member.incarnation > victim.incarnation, "it is back", 90)
    cluster.assert_idle(20)


async def helping(cluster: LocalCluster) -> str:
    """The worker that computes for the other one."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        numbers = await asyncio.to_thread(cluster.numbers)
        taking = [name for name in PREFILLS if numbers[name]["handoffs"]]
        if taking and numbers[next(name for name in PREFILLS if name not in taking)]["requests_running"]:
            return next(name for name in PREFILLS if name not in taking)
        await asyncio.sleep(0.02)
    raise AssertionError(f"nobody helped\n{cluster.log()}")
