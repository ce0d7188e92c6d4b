"""Roles changed in a running cluster, under load: nobody's request is lost and every role serves afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.cluster import SPLIT, Answer, LocalCluster, complete, running
from support.oracle import Oracle

from moonpool.core.ids import Role
from moonpool.core.membership import Liveness
from moonpool.wire import pb

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TOKENS = 40


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Iterator[Oracle]:
    oracle = Oracle(tiny_model, threads=1)
    yield oracle
    oracle.comparison.allow()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LocalCluster]:
    """A tiny model, so slow a step would end before a role is switched: answers are long instead."""
    settings = {
        "model__dtype": "float32",
        "engine__poison": True,
        "engine__block_tokens": 16,
        "engine__page_bytes": 8 << 20,
        "store__pool_bytes": 32 << 20,
        "store__region_bytes": 8 << 20,
    }
    with running(LocalCluster(tmp_path_factory.mktemp("switching"), tiny_model, SPLIT, **settings)) as cluster:
        yield cluster


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(f"switching {seed}")
    return [draw.randrange(128) for _ in range(length)]


def switch(cluster: LocalCluster, name: str, role: str, drain_ms: int = 0) -> None:
    with grpc.insecure_channel(cluster.member(name).address) as channel:
        pb.admin_rpc.AdminStub(channel).SwitchRole(pb.admin.SwitchRoleRequest(role=role, drain_ms=drain_ms), timeout=5)


def serves_as(cluster: LocalCluster, name: str, role: Role, incarnation: int = 0) -> bool:
    change = cluster.changes()[name]
    member = change.member
    return change.liveness is Liveness.LIVE and member.ready and member.role is role and member.incarnation > incarnation


def rebalance(cluster: LocalCluster, *options: str) -> subprocess.CompletedProcess[str]:
    """``moonpool rebalance`` as a user types it."""
    where = ("--set", f"cluster.state_dir={cluster.folder / 'state'}", "--set", f"cluster.name={cluster.name}")
    command = [sys.executable, "-m", "moonpool.cli.main", "rebalance", *where, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def load(cluster: LocalCluster, prompts: list[list[int]], pause_s: float) -> list[Answer]:
    async with cluster.client() as client:
        tasks = []
        for ids in prompts:
            tasks.append(asyncio.create_task(complete(client, ids, TOKENS)))
            await asyncio.sleep(pause_s)
        return list(await asyncio.gather(*tasks))


async def test_a_prefill_worker_turns_to_decode_and_back_under_load_and_nothing_is_lost(
    cluster: LocalCluster, oracle: Oracle
) -> None:
    before = cluster.member("prefill-1")
    prompts = [prompt(100 + 40 * (seed % 4), seed) for seed in range(16)]
    loading = asyncio.create_task(load(cluster, prompts, 0.2))
    await asyncio.sleep(0.7)
    done = await asyncio.to_thread(rebalance, cluster, "--apply", "--switch", "prefill-1=decode")
    answers = await loading
    assert done.returncode == 0, done.stdout + done.stderr
    assert "switch prefill-1 to decode" in done.stdout
    assert "prefill-1 drains" in done.stderr and "prefill-1 is back as decode" in done.stderr
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.body
        oracle.check(ids, answer.ids, "while a role was switched")
    after = cluster.member("prefill-1")
    assert after.pid == before.pid, "the process, and the model it had loaded, stayed"
    assert after.incarnation > before.incarnation

    fresh = [prompt(150, seed) for seed in range(100, 104)]
    for ids, answer in zip(fresh, await load(cluster, fresh, 0.05), strict=True):
        assert answer.status == 200, answer.body
        oracle.check(ids, answer.ids, "after a role was switched")
    numbers = cluster.numbers()
    assert numbers["prefill-0"]["jobs_count"], "the prefill worker that is left computes"
    assert numbers["prefill-1"]["started_count"], "the new decode worker takes its share"
    cluster.assert_idle(20)
    told = json.loads((await asyncio.to_thread(rebalance, cluster, "--json")).stdout)
    assert (told["now"]["prefill"], told["now"]["decode"]) == (1, 2)
    assert told["switches"] == [] and told["held_back"], "nothing is under pressure"
    refused = await asyncio.to_thread(rebalance, cluster, "--apply", "--switch", "conductor-0=decode")
    assert refused.returncode == 1 and "a conductor process, which has no other role" in refused.stderr

    os.kill(after.pid, signal.SIGKILL)
    await asyncio.to_thread(
        cluster.until,
        lambda: serves_as(cluster, "prefill-1", Role.DECODE, after.incarnation),
        "the restart keeps the role",
        90,
    )
    await asyncio.to_thread(switch, cluster, "prefill-1", "prefill")
    await asyncio.to_thread(cluster.until, lambda: serves_as(cluster, "prefill-1", Role.PREFILL), "and back", 60)


async def test_requests_that_do_not_finish_in_time_move_and_keep_their_ids(cluster: LocalCluster, oracle: Oracle) -> None:
    """The only decode worker drains: its long answers go on elsewhere once the next decode worker is there."""
    cluster.until(lambda: serves_as(cluster, "prefill-1", Role.PREFILL), "two prefill workers", 60)
    prompts = [prompt(100, seed) for seed in range(200, 202)]
    async with cluster.client() as client:
        tasks = [asyncio.create_task(complete(client, ids, 500)) for ids in prompts]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(switch, cluster, "prefill-1", "decode")
        await asyncio.to_thread(cluster.until, lambda: serves_as(cluster, "prefill-1", Role.DECODE), "a second one", 60)
        await asyncio.to_thread(switch, cluster, "decode-0", "prefill", 1)
        answers = await asyncio.gather(*tasks)
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.status == 200, answer.body
        assert len(answer.ids) == 500
        oracle.check(ids, answer.ids, "moved by a drain")
    cluster.until(lambda: serves_as(cluster, "decode-0", Role.PREFILL), "roles exchanged", 60)
