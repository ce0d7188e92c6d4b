"""A store node, its host's workers and a writer, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, store_node, worker, writer


async def until(condition: Callable[[], bool], what: str) -> None:
    """Polls: the node's own timers decide when."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came true: {what}")


async def test_blocks_published_by_a_worker_are_found_pinned_and_read_back(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("k", 3)
        assert await client.publish([(key, block_bytes(key)) for key in keys]) == 3
        assert await client.lookup([*keys, b"x" * 16]) == 3
        ticket = await client.pin([*keys, b"x" * 16])
        assert [slot.key for slot in ticket.slots] == keys
        page = np.empty(LAYOUT.block_bytes, np.uint8)
        for layer in range(LAYOUT.layers):
            start = layer * LAYOUT.slice_bytes
            client.read_slice(ticket.slots[1], layer, page[start : start + LAYOUT.slice_bytes], LAYOUT.block_tokens)
        assert (page == block_bytes(keys[1])).all()
        await client.unpin(ticket)
        await client.unpin(ticket)
        assert node.numbers()["pins"] == 0


async def test_a_pushed_prompt_lands_is_relayed_and_sealed(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, heard), writer(node) as pusher:
        keys = block_keys("p", 2)
        landing = await pusher.grant("r1", keys, tail_valid=5, reader="decode-0", reader_incarnation=1)
        assert [slot.block for slot in landing.slots] == [0, 1, 2]
        await pusher.push(landing)
        await until(lambda: len(heard.landed) == LAYOUT.layers, "all layers relayed")
        assert {(one.layer, one.blocks) for one in heard.landed} == {(layer, (0, 1, 2)) for layer in range(LAYOUT.layers)}
        tail = landing.slots[2]
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        client.read_slice(tail.slot, 0, into, tail.valid)
        assert not into.reshape(4, 16, 16)[:, 5:].any()
        assert await client.lookup(keys) == 2
        await pusher.drain(landing)
        await client.end_landing(landing.id)
        await client.end_landing(landing.id)
        assert node.numbers()["slots_sealed"] == 2
        assert node.numbers()["slots_free"] == 14
        assert node.numbers()["pins"] == 0


async def test_a_worker_that_leaves_takes_its_pins_with_it(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node:
        async with worker(node) as (client, _):
            keys = block_keys("k", 2)
            await client.publish([(key, block_bytes(key)) for key in keys])
            await client.pin(keys)
            assert node.numbers()["pidfds"] == 1
        await until(lambda: node.numbers()["sessions"] == 0, "the session ended")
        assert node.numbers()["pins"] == 0
        assert node.numbers()["tickets"] == 0
