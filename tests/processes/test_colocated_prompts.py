"""A cluster whose decode worker computes some prompts itself, because the one prefill worker is busy."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.cluster import LocalCluster, complete, running
from support.oracle import Oracle

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NODES = [{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]
ROUNDS, TOGETHER, TOKENS = 3, 12, 16


async def test_prompts_computed_at_either_worker_get_the_ids_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    settings = {
        "model__dtype": "float32",
        "engine__poison": True,
        "engine__block_tokens": 16,
        "engine__page_bytes": 8 << 20,
        "store__pool_bytes": 32 << 20,
        "store__region_bytes": 8 << 20,
        "scheduler__colocate": True,
    }
    oracle, draw = Oracle(tiny_model, threads=1), random.Random(5)
    with running(LocalCluster(tmp_path_factory.mktemp("colocated"), tiny_model, NODES, **settings)) as cluster:
        async with cluster.client() as client:
            for _ in range(ROUNDS):  # the first ones teach the conductor what a prompt costs
                lengths = [draw.choice((20, 60, 500, 900)) for _ in range(TOGETHER)]
                prompts = [[draw.randrange(128) for _ in range(length)] for length in lengths]
                answers = await asyncio.gather(*(complete(client, prompt, TOKENS) for prompt in prompts))
                for prompt, answer in zip(prompts, answers, strict=True):
                    assert answer.status == 200, answer.body
                    oracle.check(prompt, answer.ids, "prefill or decode worker")
        numbers = cluster.numbers()
        jobs, started = numbers["prefill-0"]["jobs_count"], numbers["decode-0"]["started_count"]
        assert started == ROUNDS * TOGETHER
        assert 0 < jobs < started, "some prompts were computed by either worker"
        cluster.assert_idle()
    oracle.comparison.allow()
