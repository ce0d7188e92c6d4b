"""Several nodes whose blocks lie on SSD: fetched, copied and drained like those in DRAM."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.store import LAYOUT
from support.stores import Stores, block_keys, stores, until

from moonpool.wire import pb
from moonpool.wire.convert import to_wire


@asynccontextmanager
async def tiered(folder: Path, *nodes: str, slots: int = 16) -> AsyncIterator[Stores]:
    """Everything is written through, so that what leaves DRAM is on SSD."""
    ssd: dict[str, Any] = {"ssd_path": str(folder / "ssd"), "ssd_bytes": 16 << 20, "ssd_write": "through", "demote_below": 0.1}
    async with stores(folder, *nodes, slots=slots, store=ssd) as s:
        yield s


async def push_down(s: Stores, name: str, keys: list[bytes]) -> None:
    """Until ``keys`` lie on SSD only: other sequences take their room."""
    node = s.nodes[name]
    for turn in range(40):
        if len(node.pool.on_ssd(keys)) == len(keys):
            return
        await s.publish(name, block_keys(f"{name}{turn}-", 4))
        await until(lambda: not node.numbers()["demotions_open"], "nothing is on its way down")
    raise AssertionError(f"{len(node.pool.on_ssd(keys))} of {len(keys)} blocks are on SSD only")


async def test_a_prefix_is_fetched_from_a_node_that_has_it_on_ssd_only(tmp_path: Path) -> None:
    async with tiered(tmp_path, "a", "b") as s:
        keys = block_keys("k", 6)
        await s.publish("a", keys)
        await push_down(s, "a", keys)
        assert [slot.key for slot in (await s.fetch("b", keys, "a")).slots] == keys
        await s.require_right("b", keys)
        assert s.nodes["a"].numbers()["ssd_reads_ok"] == 6
        await s.require_idle()


async def test_what_a_leaving_node_has_on_ssd_only_is_copied_too(tmp_path: Path) -> None:
    async with tiered(tmp_path, "a", "b", slots=24) as s:
        keys = block_keys("k", 4)
        await s.publish("a", keys)
        await push_down(s, "a", keys)
        report = await s.nodes["a"].leave()
        assert report.blocks_left == 0
        assert report.blocks_saved == len(s.nodes["a"].pool.held.index)
        assert await s.workers["b"].lookup(keys) == 4
        ticket = await s.workers["b"].pin(keys, load_ms=10_000)
        assert len(ticket.slots) == 4
        await s.workers["b"].unpin(ticket)
        await s.require_right("b", keys)
        await s.require_idle()


async def test_a_copy_that_lies_on_ssd_is_not_made_again(tmp_path: Path) -> None:
    async with tiered(tmp_path, "a", "b") as s:
        keys = block_keys("k", 4)
        for node in ("a", "b"):
            await s.publish(node, keys)
        await push_down(s, "b", keys)
        request = pb.store.ReplicateRequest(keys=keys, node="a", deadline_ms=5_000, layout=to_wire(LAYOUT, pb.types.KVLayout()))
        reply = await s.workers["b"]._stub.Replicate(request)
        assert (reply.blocks, reply.bytes) == (4, 0)
        assert s.orders == []
