"""A cluster whose model keeps latents instead of keys and values, against the library's own generation in fp32."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.cluster import LocalCluster, complete, running
from support.oracle import Oracle

from moonpool.bench.tiny_model import TINY_IDS, make_tiny_latent_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NODES = [{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]
BLOCK = 16
LENGTHS = (1, 15, 16, 17, 32, 48, 100)
TOKENS = 12


def warm(length: int) -> int:
    """Tokens of a prompt seen before: whole blocks, and never its last token."""
    return min(length // BLOCK * BLOCK, length - 1)


async def test_split_workers_equal_the_library_cold_cached_in_a_batch_and_from_the_pool(tmp_path: Path) -> None:
    model = make_tiny_latent_model(tmp_path / "model")
    oracle, draw = Oracle(model), random.Random(1)
    prompts = [draw.choices(range(TINY_IDS), k=length) for length in LENGTHS]
    settings = {"model__dtype": "float32", "engine__block_tokens": BLOCK, "engine__poison": True, "store__pool_bytes": 64 << 20}
    with running(LocalCluster(tmp_path, model, NODES, **settings)) as cluster:
        async with cluster.client() as client:
            for cached in (0, 1):
                answers = await asyncio.gather(*(complete(client, ids, TOKENS) for ids in prompts))
                for ids, answer in zip(prompts, answers, strict=True):
                    oracle.check(ids, answer.ids, f"asked {cached + 1} times")
                    assert answer.cached == cached * warm(len(ids))
                cluster.assert_idle()
            cluster.clear_device_pages("prefill-0", "decode-0")
            for ids in prompts:
                answer = await complete(client, ids, TOKENS)
                oracle.check(ids, answer.ids, "from the pool")
                assert answer.cached <= warm(len(ids)), "what comes late is computed instead"
        cluster.assert_idle()
    oracle.comparison.allow()
