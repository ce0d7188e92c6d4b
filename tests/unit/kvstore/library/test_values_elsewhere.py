"""Values that another node has, got through the library as if they were here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.store import Roll, config, store_node

from moonpool.core.config import MIB
from moonpool.kvstore import Put, StoreClient
from moonpool.kvstore.library.objects import CHUNK

TWO_NODES = {"store": {"pool_bytes": 48 * MIB, "region_bytes": 48 * MIB}, "transfer": {"carrier": "tcp"}}


def bytes_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed + size).integers(0, 255, size, dtype=np.uint8).tobytes()


async def test_a_get_brings_whole_values_from_the_node_that_has_them(tmp_path: Path) -> None:
    roll, settings = Roll(), config(tmp_path, **TWO_NODES)
    values = {f"v{i}": bytes_of(size, i) for i, size in enumerate([0, 100, CHUNK, 3 * CHUNK + 7])}
    async with store_node(settings, roll, "a") as a, store_node(settings, roll, "b") as b:
        async with await StoreClient.connect(tmp_path / "a.store.sock") as here:
            await here.put_many(list(values.items()))
        async with await StoreClient.connect(tmp_path / "b.store.sock") as there:
            assert await there.exists_many(list(values)) == [False] * 4  # of its own host only
            assert await there.get_many(["nobody", *values]) == [None, *values.values()]
            assert await there.exists_many(list(values)) == [True] * 4
            moved = b.fetcher.bytes_in
            assert await there.get_many(list(values)) == list(values.values())
            assert b.fetcher.bytes_in == moved
            assert await there.put("v1", b"other") is Put.THERE
        for node in (a, b):
            assert (node.pool.numbers()["pins"], node.pool.numbers()["landings_open"]) == (0, 0)


async def test_without_time_to_fetch_a_value_of_another_node_is_a_miss(tmp_path: Path) -> None:
    roll, settings = Roll(), config(tmp_path, **TWO_NODES)
    async with store_node(settings, roll, "a"), store_node(settings, roll, "b"):
        async with await StoreClient.connect(tmp_path / "a.store.sock") as here:
            await here.put("v", b"x")
        async with await StoreClient.connect(tmp_path / "b.store.sock", fetch_ms=0) as there:
            assert await there.get("v") is None


async def test_a_node_that_is_listed_but_gone_costs_no_answer(tmp_path: Path) -> None:
    roll, settings = Roll(), config(tmp_path, **TWO_NODES)
    async with store_node(settings, roll, "b"):
        async with store_node(settings, roll, "a"):
            pass
        async with await StoreClient.connect(tmp_path / "b.store.sock", fetch_ms=500) as there:
            assert await there.put("mine", b"1") is Put.STORED
            assert await there.get_many(["v", "mine"]) == [None, b"1"]
            assert await there.get("w") is None
