"""The whole cluster as Ray actors: answers, carriers, a killed actor's return, a stop that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import psutil
import pytest
from support.cluster import SPLIT, LocalCluster, complete
from support.oracle import Oracle

from moonpool.bench.tiny_model import TINY_IDS
from moonpool.cluster.survey import carriers_between_nodes, survey
from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(600)]

VICTIM = "prefill-0"


def prompt(length: int, seed: int) -> list[int]:
    return [random.Random(f"ray {seed}/{i}").randrange(TINY_IDS) for i in range(length)]


def ray_processes() -> set[int]:
    """Control processes of any local Ray cluster; workers end with them."""
    return {p.pid for p in psutil.process_iter(["name"]) if p.info["name"] in ("raylet", "gcs_server")}


async def test_a_cluster_of_actors_answers_survives_a_kill_and_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    before, segments = ray_processes(), set(Path("/dev/shm").glob("moonpool+*"))
    oracle = Oracle(tiny_model, threads=1)
    settings = {"model__dtype": "float32", "store__pool_bytes": 64 << 20, "engine__page_bytes": 32 << 20}
    cluster = LocalCluster(tmp_path / "rayed", tiny_model, SPLIT, transfer__carrier="ucx", **settings)
    cluster.folder.mkdir()
    cluster.start("ray")
    try:
        state = cluster.state
        assert state is not None
        prompts = [prompt(300, seed) for seed in range(4)]
        async with cluster.client() as client:
            tasks = [asyncio.create_task(complete(client, ids, 8)) for ids in prompts]
            first = cluster.member(VICTIM)
            os.kill(first.pid, signal.SIGKILL)
            for ids, answer in zip(prompts, await asyncio.gather(*tasks), strict=True):
                assert answer.status == 200, answer.body
                oracle.check(ids, answer.ids, "on Ray, after a kill")

        def back() -> bool:
            change = cluster.changes()[VICTIM]
            return change.liveness is Liveness.LIVE and change.member.incarnation > first.incarnation

        cluster.until(back, f"{VICTIM} is back", 90)
        cluster.assert_idle(20)
        assert carriers_between_nodes(await survey(state.registry)) == {"ucx"}
    finally:
        code = cluster.stop()
    oracle.comparison.allow()
    assert code == 130, cluster.log()
    assert ray_processes() <= before
    assert set(Path("/dev/shm").glob("moonpool+rayed+*")) <= segments
