"""A live cluster whose prefill workers have two ranks and whose decode worker has one, and the end of a rank."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.cluster import LocalCluster, complete, running
from support.oracle import Oracle

from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROMPTS, TOKENS, OUTPUTS = 64, 200, 4


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Iterator[Oracle]:
    oracle = Oracle(tiny_model, threads=1)
    yield oracle
    oracle.comparison.allow()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalCluster]:
    nodes = [
        {"name": "a", "prefill": 1, "tensor_parallel": 2},
        {"name": "b", "decode": 1, "conductor": 1, "gateway": 1},
    ]
    settings = {
        "model__dtype": "float32",
        "engine__poison": True,
        "engine__block_tokens": 16,
        "engine__page_bytes": 16 << 20,
        "store__pool_bytes": 64 << 20,
    }
    with running(LocalCluster(tmp_path_factory.mktemp("degrees"), tiny_model, nodes, **settings)) as cluster:
        yield cluster


def prompts(seed: int) -> list[list[int]]:
    return [random.Random(f"{seed}/{i}").choices(range(128), k=TOKENS) for i in range(PROMPTS)]


def ranks_of(cluster: LocalCluster, member: str) -> list[psutil.Process]:
    children = psutil.Process(cluster.member(member).pid).children()
    return [child for child in children if "moonpool.engine.tensor_parallel" in child.cmdline()]


async def ask(cluster: LocalCluster, oracle: Oracle, asked: list[list[int]], what: str) -> None:
    async with cluster.client() as client:
        answers = await asyncio.gather(*(complete(client, ids, OUTPUTS) for ids in asked))
    for ids, answer in zip(asked, answers, strict=True):
        assert answer.status == 200, answer.body
        oracle.check(ids, answer.ids, what)


async def test_many_prompts_at_once_are_answered_as_by_equal_degrees(cluster: LocalCluster, oracle: Oracle) -> None:
    assert [len(ranks_of(cluster, name)) for name in ("prefill-0", "decode-0")] == [1, 0]
    await ask(cluster, oracle, prompts(1), "two ranks to one")
    cluster.assert_idle()


async def test_a_worker_that_lost_a_rank_comes_back_whole(cluster: LocalCluster, oracle: Oracle) -> None:
    before = cluster.member("prefill-0")
    (rank,) = ranks_of(cluster, "prefill-0")
    rank.send_signal(signal.SIGKILL)

    def is_back() -> bool:
        now = cluster.changes()["prefill-0"]
        return now.liveness is Liveness.LIVE and now.member.ready and now.member.incarnation > before.incarnation

    cluster.until(is_back, "the worker is started anew", 120.0)
    assert not psutil.pid_exists(before.pid)
    assert [other.pid for other in ranks_of(cluster, "prefill-0")] not in ([], [rank.pid])
    await ask(cluster, oracle, prompts(2)[:8], "after a rank ended")
    cluster.assert_idle()
