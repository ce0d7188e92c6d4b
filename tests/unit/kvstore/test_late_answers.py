"""Answers that come when nobody waits for them any more: what they granted is given back, whoever was slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.store import Roll, block_bytes, block_keys, config, store_node, until, worker

from moonpool.core.errors import PeerSilent
from moonpool.core.ids import NodeId
from moonpool.kvstore.node import StoreNode

KEYS = block_keys("late", 3)


class SlowFetches:
    """The node's fetcher, whose answers wait for ``gate``. It does not heed that its caller has left, as a frozen process
    would not."""

    def __init__(self, node: StoreNode) -> None:
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self._fetch = node.fetcher.fetch

    async def fetch(self, *args: Any, **values: Any) -> Any:
        self.begun.set()
        return await asyncio.shield(self._answer(*args, **values))

    async def _answer(self, *args: Any, **values: Any) -> Any:
        await self.gate.wait()
        return await self._fetch(*args, **values)


async def test_a_fetch_answered_after_its_callers_patience_leaves_no_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll = Roll()
    async with store_node(config(tmp_path), roll) as node, worker(node, "reader") as (client, _):
        await client.publish([(key, block_bytes(key)) for key in KEYS])
        slow = SlowFetches(node)
        monkeypatch.setattr(node.fetcher, "fetch", slow.fetch)
        with pytest.raises(PeerSilent):
            await client.fetch(KEYS, NodeId("b"), "", 10)
        slow.gate.set()
        await until(lambda: client.counted["undone"] == 1, "the late answer is undone")
        numbers = node.pool.numbers()
        assert (numbers["tickets"], numbers["pins"]) == (0, 0)


async def test_a_cancelled_fetch_leaves_no_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roll = Roll()
    async with store_node(config(tmp_path), roll) as node, worker(node, "reader") as (client, _):
        await client.publish([(key, block_bytes(key)) for key in KEYS])
        slow = SlowFetches(node)
        monkeypatch.setattr(node.fetcher, "fetch", slow.fetch)
        fetching = asyncio.create_task(client.fetch(KEYS, NodeId("b"), "", 5_000))
        await slow.begun.wait()
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        slow.gate.set()
        await until(lambda: client.counted["undone"] == 1, "the late answer is undone")
        numbers = node.pool.numbers()
        assert (numbers["tickets"], numbers["pins"]) == (0, 0)
