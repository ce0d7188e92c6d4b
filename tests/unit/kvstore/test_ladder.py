"""A store node with an SSD tier: blocks go down under pressure, come up when asked for, and survive the node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, store_node, until, worker

from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.ladder import STAY_S
from moonpool.kvstore.node import StoreNode

SLOTS = 16
LOAD_MS = 20_000


def settings(folder: Path, **store: Any) -> Any:
    given = {"ssd_path": str(folder / "ssd"), "ssd_bytes": 16 << 20, "demote_below": 0.5, "demote_until": 0.75}
    made = config(folder, slots=SLOTS)
    return made.model_copy(update={"store": made.store.model_copy(update=given | store)})


async def publish(client: WorkerStore, keys: Sequence[bytes]) -> None:
    assert await client.publish([(key, block_bytes(key)) for key in keys]) == len(keys)


async def require_right(client: WorkerStore, keys: Sequence[bytes], load_ms: int = LOAD_MS) -> None:
    """All of ``keys`` can be had, and every byte of them is right."""
    ticket = await client.pin(keys, Use(), load_ms)
    assert [slot.key for slot in ticket.slots] == list(keys)
    into = np.empty(LAYOUT.slice_bytes, np.uint8)
    for slot in ticket.slots:
        for layer in range(LAYOUT.layers):
            client.read_slice(slot, layer, into, LAYOUT.block_tokens)
            assert (into == slices.slice_of(LAYOUT, block_bytes(slot.key), 0, layer)).all()
    await client.unpin(ticket)


def in_dram(node: StoreNode, keys: Sequence[bytes]) -> int:
    on_ssd = {key for key, _ in node.pool.on_ssd(keys)}
    return sum(key not in on_ssd for key in keys[: node.pool.lookup(keys)])


async def push_down(node: StoreNode, client: WorkerStore, keys: Sequence[bytes]) -> None:
    """Until ``keys`` lie on SSD only: other sequences take the room, one after the other."""
    turn = 0
    while in_dram(node, keys):
        await publish(client, block_keys(f"o{node.numbers()['event_head']:.0f}-", 4))
        await until(lambda: node.numbers()["demotions_open"] == 0, "nothing is on its way down")
        turn += 1
        assert turn < 60, "the blocks stay in DRAM"
    assert node.pool.lookup(keys) == len(keys)


async def test_cold_blocks_go_down_before_their_room_is_taken_and_come_up_right(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("cold", 6)
        await publish(client, keys)
        await push_down(node, client, keys)
        assert await client.lookup(keys) == 6
        assert (await client.pin(keys)).slots == (), "without time to load, DRAM is all there is"
        await require_right(client, keys)
        numbers = node.numbers()
        assert numbers["ssd_reads_ok"] == 6
        assert numbers["pins"] == numbers["promotions_open"] == 0
        await require_right(client, keys)
        found = {tier: node.numbers()[f"prefix_tokens_{tier}_count"] for tier in ("dram", "ssd", "shared")}
        assert found == {"dram": 6 * LAYOUT.block_tokens, "ssd": 6 * LAYOUT.block_tokens, "shared": 0}, "where they lay then"


async def test_readers_of_one_prefix_share_its_way_up(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("cold", 6)
        await publish(client, keys)
        await push_down(node, client, keys)
        await asyncio.gather(*(require_right(client, keys) for _ in range(8)))
        assert node.numbers()["ssd_reads_ok"] == 6


async def test_written_through_every_block_survives_the_node(tmp_path: Path) -> None:
    through = settings(tmp_path, ssd_write="through")
    keys = block_keys("kept", 6)
    async with store_node(through, Roll()) as node, worker(node) as (client, _):
        await publish(client, keys)
        await until(lambda: node.numbers()["blocks_on_ssd"] == 6, "all are on SSD")
    async with store_node(through, Roll()) as node, worker(node) as (client, _):
        assert await client.lookup(keys) == 6
        await require_right(client, keys)


async def test_written_back_blocks_survive_an_orderly_end_of_the_node(tmp_path: Path) -> None:
    back = settings(tmp_path, demote_below=0.0, demote_until=0.0)
    keys = block_keys("kept", 6)
    async with store_node(back, Roll()) as node, worker(node) as (client, _):
        await publish(client, keys)
        assert node.numbers()["blocks_on_ssd"] == 0
        await node.leave()
        assert node.numbers()["pins"] == 0
    async with store_node(back, Roll()) as node, worker(node) as (client, _):
        await require_right(client, keys)


async def test_what_is_cleared_is_not_found_after_a_restart(tmp_path: Path) -> None:
    through = settings(tmp_path, ssd_write="through")
    keys = block_keys("secret", 6)
    async with store_node(through, Roll()) as node, worker(node) as (client, _):
        await publish(client, keys)
        await until(lambda: node.numbers()["blocks_on_ssd"] == 6, "all are on SSD")
        node.pool.clear(keys[2:])
        node.changed()
        await until(lambda: node.lower.ladder is not None and node.lower.ladder.idle, "their extents are erased")
    async with store_node(through, Roll()) as node, worker(node) as (client, _):
        assert await client.lookup(keys) == 2


async def test_a_block_that_went_bad_on_ssd_ends_the_prefix_and_is_counted(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("cold", 6)
        await publish(client, keys)
        await push_down(node, client, keys)
        (path,) = (p for p in (tmp_path / "ssd").rglob("*") if p.is_file() and flip(p, block_bytes(keys[3])))
        ticket = await client.pin(keys, Use(), LOAD_MS)
        assert [slot.key for slot in ticket.slots] == keys[:3], path
        await client.unpin(ticket)
        assert node.numbers()["digest_mismatches_ssd"] == 1
        assert await client.lookup(keys) == 3


def flip(path: Path, content: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Flip one bit of every copy of ``content`` in the file; whether there was one."""
    raw = bytearray(path.read_bytes())
    at, found = raw.find(content.tobytes()), False
    while at >= 0:
        raw[at + 100] ^= 4
        found = True
        at = raw.find(content.tobytes(), at + 1)
    if found:
        with path.open("r+b") as file:
            file.write(raw)
    return found


async def test_the_tier_is_full_and_the_coldest_leaves_make_room(tmp_path: Path) -> None:
    small = settings(tmp_path, ssd_bytes=1 << 19)
    async with store_node(small, Roll()) as node, worker(node) as (client, _):
        for i in range(30):
            await publish(client, block_keys(f"s{i}-", 4))
            await until(lambda: node.numbers()["demotions_open"] == 0, "nothing is on its way down")
        numbers = node.numbers()
        assert 0 < numbers["blocks_on_ssd"] < 120
        assert numbers["ssd_blocks_written"] > numbers["blocks_on_ssd"]
        last = block_keys("s29-", 4)
        await require_right(client, last)


async def test_a_slow_disk_holds_nobody_longer_than_asked(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path, ssd_read_bytes_per_s=float(2 * LAYOUT.slot_bytes)), Roll()) as node:
        async with worker(node) as (client, _):
            keys = block_keys("cold", 8)
            await publish(client, keys)
            await push_down(node, client, keys)
            loop = asyncio.get_running_loop()
            begun = loop.time()
            ticket = await client.pin(keys, Use(), 600)
            assert loop.time() - begun < 2.5
            assert 0 < len(ticket.slots) < 8, "what came in time is used, the rest is computed"
            await client.unpin(ticket)


@pytest.mark.parametrize("write", ["back", "through"])
async def test_a_node_without_room_on_its_disk_serves_from_dram(tmp_path: Path, write: str) -> None:
    (tmp_path / "ssd").mkdir()
    async with store_node(settings(tmp_path, ssd_write=write), Roll()) as node, worker(node) as (client, _):
        for path in (tmp_path / "ssd").rglob("*"):
            if path.is_file():
                path.unlink()
        for i in range(12):
            keys = block_keys(f"s{i}-", 4)
            await publish(client, keys)
            await require_right(client, keys)


async def test_a_snapshot_and_the_events_name_the_tier(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        keys = block_keys("cold", 4)
        await publish(client, keys)
        await push_down(node, client, keys)
        snapshot = node._snapshot()
        tiers = {tier.value: set(found) for tier, found in snapshot.entries}
        assert set(keys) <= tiers["g3"]
        assert not set(keys) & tiers["g2"]


async def test_what_was_read_once_leaves_dram_before_what_is_read_often(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path, promote_after=3), Roll()) as node, worker(node) as (client, _):
        hot, once = block_keys("hot", 4), block_keys("once", 4)
        for keys in (hot, once):
            await publish(client, keys)
        await push_down(node, client, hot)
        await push_down(node, client, once)
        for _ in range(3):
            await require_right(client, hot)
            await push_down(node, client, hot)
        await require_right(client, hot)
        await require_right(client, once)
        await asyncio.sleep(STAY_S)
        node.changed()
        await until(lambda: in_dram(node, once) == 0, "what was read once is gone from DRAM")
        assert in_dram(node, hot) == 4


async def test_what_one_node_sealed_another_finds_in_the_shared_tier(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    shared = settings(tmp_path, ssd_path="", shared_path=str(tmp_path / "shared"))
    keys, roll = block_keys("kept", 6), Roll()
    async with store_node(shared, roll) as node, worker(node) as (client, _):
        await publish(client, keys)
        await until(lambda: node.numbers()["shared_blocks_written"] == 6, "all are in the shared tier")
    async with store_node(shared, roll, "b") as node, worker(node) as (client, _):
        assert await client.lookup(keys) == 0
        await require_right(client, keys)
        assert node.numbers()["shared_reads_ok"] == 6
        assert node.numbers()["prefix_tokens_shared_count"] == 6 * LAYOUT.block_tokens


async def test_what_is_cleared_leaves_the_shared_tier_too(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    shared = settings(tmp_path, ssd_path="", shared_path=str(tmp_path / "shared"))
    keys, roll = block_keys("secret", 6), Roll()
    async with store_node(shared, roll) as node, worker(node) as (client, _):
        await publish(client, keys)
        await until(lambda: node.numbers()["shared_blocks_written"] == 6, "all are in the shared tier")
        node.pool.clear(keys[2:])
        node.changed()
        await until(lambda: node.numbers()["shared_erased"] == 4, "they are erased")
    async with store_node(shared, roll, "b") as node, worker(node) as (client, _):
        ticket = await client.pin(keys, Use(), LOAD_MS)
        assert len(ticket.slots) == 2
        await client.unpin(ticket)
