"""The split path with KV bytes encrypted between nodes and on SSD: the same answers, and the store's files say nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.patience import wait_for_loads
from support.split import Split, split_path
from support.store import block_keys, until

from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.placement import Segment, Source
from moonpool.kvstore.client import WorkerStore

CLOSED = {"kv_encryption": "aes-gcm"}


@pytest.fixture(autouse=True)
def loading_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_loads(monkeypatch)


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def push_down(split: Split, node: str, keys: list[bytes]) -> None:
    """Until ``keys`` lie on SSD only: other blocks take their room."""
    store = split.stores[node]
    me = replace(store.member, id=MemberId("filler"), incarnation=Incarnation(1))
    client = await WorkerStore.connect(
        store.member.address, me, store.layout, on_landed=lambda _: None, on_failed=lambda _: None, on_lost=lambda: None
    )
    page = np.zeros(store.layout.block_bytes, np.uint8)
    for turn in range(100):
        if len(store.pool.on_ssd(keys)) == len(keys):
            break
        await client.publish([(key, page) for key in block_keys(f"f{turn}-", 4)])
        await until(lambda: not store.numbers()["demotions_open"], "nothing is on its way down")
    await client.close()
    assert len(store.pool.on_ssd(keys)) == len(keys)


async def test_answers_are_the_same_from_another_nodes_memory_and_its_ssd(tmp_path: Path, tiny_model: Path) -> None:
    tiers = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 32 << 20, "ssd_write": "through"}
    security = CLOSED | {"kv_key_file": str(tmp_path / "kv.key")}
    async with split_path(tmp_path, tiny_model, nodes=("a", "b"), slots=24, store=tiers, security=security) as split:
        request = split.asker.request(ids(48), max_tokens=5)
        cold = await split.gateway.ask(request)
        await split.idle()
        assert cold.ids == split.oracle(request)
        numbers = split.stores["b"].numbers()
        assert numbers["bytes_landed_tcp"] > 0 and not numbers["tcp_forged"]
        await split.clear_device_pages()
        split.place(segments=[Segment(0, 3, Source.FETCH, NodeId("b"))])
        await push_down(split, "b", list(request.keys))
        warm = await split.gateway.ask(split.asker.request(ids(48), max_tokens=5))
        await split.idle()
        assert warm.ids == cold.ids and warm.cached_tokens >= 32
        assert split.stores["b"].numbers()["ssd_reads_ok"] >= 3
        raw = b"".join(path.read_bytes() for path in (tmp_path / "ssd").rglob("segment-*"))
        assert raw.count(b"MPSSDEXT") >= 3 and not any(key in raw for key in request.keys)


async def test_ucx_by_name_is_refused_where_kv_bytes_are_encrypted(tmp_path: Path, tiny_model: Path) -> None:
    security = CLOSED | {"kv_key_file": str(tmp_path / "kv.key")}
    with pytest.raises(ConfigError, match=r"'ucx' cannot be protected by security.kv_encryption"):
        async with split_path(tmp_path, tiny_model, nodes=("a", "b"), carrier="ucx", security=security):
            pass
