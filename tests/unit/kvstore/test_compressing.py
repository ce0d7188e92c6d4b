"""Lossy copies on a real node: made, counted, read back by whom it is allowed, and by nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_keys, config, store_node, until, worker

from moonpool.core.errors import InvalidRequest
from moonpool.core.landing import Ticket
from moonpool.core.use import Use
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.codecs.codec import coded
from moonpool.kvstore.codecs.copies import copy_key, read_key
from moonpool.kvstore.control import Control
from moonpool.kvstore.node import StoreNode

KEYS = block_keys("k", 5)
SMALL = coded(LAYOUT, "int8")
ALICE, BOB = Use("alice"), Use("bob")
LOAD_MS = 5_000


def settings(folder: Path, *, codecs: tuple[str, ...] = ("int8",), lossy_for: tuple[str, ...] = ("alice",), **more: Any) -> Any:
    return config(folder, store={"codecs": codecs, "lossy_for": lossy_for}, **more)


def values(key: bytes) -> np.ndarray[Any, Any]:
    """float32 [layers, 2 * kv_heads, tokens * head_dim] of a block, the same for everybody."""
    rng = np.random.default_rng(list(key))
    return rng.standard_normal((LAYOUT.layers, 2 * LAYOUT.kv_heads, LAYOUT.block_tokens * LAYOUT.head_dim)).astype(np.float32)


async def publish(client: WorkerStore, keys: list[bytes], parent: bytes | None = None, use: Use = ALICE) -> None:
    assert await client.publish([(key, values(key).reshape(-1).view(np.uint8)) for key in keys], parent, use) == len(keys)


def read(client: WorkerStore, ticket: Ticket, at: int) -> np.ndarray[Any, Any]:
    out = np.empty((LAYOUT.layers, LAYOUT.slice_bytes), np.uint8)
    for layer in range(LAYOUT.layers):
        client.read_slice(ticket.slots[at], layer, out[layer], LAYOUT.block_tokens)
    return out.view(np.float32).reshape(LAYOUT.layers, 2 * LAYOUT.kv_heads, -1)


def require_near(got: np.ndarray[Any, Any], key: bytes) -> None:
    meant = values(key)
    assert (np.abs(got - meant) <= np.abs(meant).max(axis=2, keepdims=True) / 250).all()
    assert (got != meant).any()


def findable(node: StoreNode, keys: list[bytes]) -> int:
    return sum(node.pool.held.index.get(key) is not None for key in keys)


async def test_copies_stand_for_full_blocks_and_serve_whom_the_configuration_names(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        plan = await node.compressor.compress(KEYS, "int8", dry_run=True)
        assert (plan.made, plan.kept, plan.bytes_before, plan.bytes_after) == (
            5,
            0,
            5 * LAYOUT.slot_bytes,
            5 * SMALL.slot_bytes,
        )
        assert findable(node, KEYS) == 5
        assert await node.compressor.compress(KEYS, "int8", dry_run=False) == plan
        assert findable(node, KEYS) == 0
        assert findable(node, [copy_key(key, "int8") for key in KEYS]) == 5
        assert (await client.pin(KEYS, BOB, LOAD_MS)).slots == ()
        assert (await client.pin(KEYS, ALICE, 0)).slots == ()
        ticket = await client.pin(KEYS, ALICE, LOAD_MS)
        assert [slot.key for slot in ticket.slots] == [read_key(key, "int8") for key in KEYS]
        for i, key in enumerate(KEYS):
            require_near(read(client, ticket, i), key)
        await client.unpin(ticket)
        again = await client.pin(KEYS, ALICE, LOAD_MS)
        assert again.slots == ticket.slots
        assert node.numbers()["lossy_copies_decoded"] == 5
        await client.unpin(again)
        assert (await client.pin(KEYS, BOB, LOAD_MS)).slots == ()


async def test_a_model_may_allow_them_for_everybody(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path, lossy_for=("toy",), model={"name": "toy"}), Roll()) as node:
        async with worker(node) as (client, _):
            await publish(client, KEYS, use=BOB)
            await node.compressor.compress(KEYS, "int8", dry_run=False)
            ticket = await client.pin(KEYS, Use("carol"), LOAD_MS)
            assert len(ticket.slots) == 5
            await client.unpin(ticket)


async def test_blocks_in_use_and_blocks_that_others_follow_keep_their_full_copy(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        await publish(client, block_keys("other", 1), KEYS[1], BOB)
        pinned = await client.pin(KEYS[:3], ALICE, 0)
        done = await node.compressor.compress(KEYS, "int8", dry_run=False)
        assert (done.made, done.kept) == (5, 3)
        assert findable(node, KEYS) == 3
        await client.unpin(pinned)
        mixed = await client.pin(KEYS, ALICE, LOAD_MS)
        assert [slot.key for slot in mixed.slots] == KEYS[:3] + [read_key(key, "int8") for key in KEYS[3:]]
        assert (read(client, mixed, 2) == values(KEYS[2])).all()
        require_near(read(client, mixed, 4), KEYS[4])
        await client.unpin(mixed)
        again = await node.compressor.compress(KEYS, "int8", dry_run=False)
        assert (again.made, again.kept) == (0, 2)  # bob's follows the first two, and he takes no copies


async def test_what_continues_the_last_block_gets_copies_too_and_decoded_blocks_get_none(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path, slots=32), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        more = [block_keys(f"{name}-", 2) for name in "xy"]
        for branch in more:
            await publish(client, branch, KEYS[4])
        plan = await node.compressor.compress(KEYS[:3], "int8", dry_run=True)
        assert (plan.made, plan.kept) == (9, 0)
        assert await node.compressor.compress(KEYS[:3], "int8", dry_run=False) == plan
        assert findable(node, [*KEYS, *more[0], *more[1]]) == 0
        await client.unpin(await client.pin([*KEYS, *more[0]], ALICE, LOAD_MS))
        assert (await node.compressor.compress(KEYS, "int8", dry_run=False)).made == 0
        gone = Control(node.pool).clean([KEYS[4]], dry_run=False)
        assert (gone.cleared, gone.kept) == (5 + 3, 0)  # copies of it and of four more, and what was decoded of three of these
        assert node.numbers()["blocks_findable"] == 4 + 4


async def test_blocks_of_those_who_allow_none_are_left_alone(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS[:2], use=ALICE)
        await publish(client, KEYS[2:], KEYS[1], BOB)
        plan = await node.compressor.compress(KEYS, "int8", dry_run=True)
        done = await node.compressor.compress(KEYS, "int8", dry_run=False)
        assert (done.made, done.kept, done.bytes_before) == (2, 2, 0)
        assert done == plan
        assert findable(node, KEYS) == 5


@pytest.mark.parametrize(("codecs", "codec"), [((), "int8"), (("int8",), "fp8"), (("int8",), "raw"), (("int8",), "zip")])
async def test_what_the_configuration_does_not_allow_is_refused(tmp_path: Path, codecs: tuple[str, ...], codec: str) -> None:
    async with store_node(settings(tmp_path, codecs=codecs), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        with pytest.raises(InvalidRequest, match=r"codec: "):
            await node.compressor.compress(KEYS, codec, dry_run=False)
        assert findable(node, KEYS) == 5


async def test_a_copy_needs_copies_of_all_blocks_before_it_and_is_never_encoded_again(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path, codecs=("int8", "fp8")), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        with pytest.raises(InvalidRequest, match="begin with the sequence's first block"):
            await node.compressor.compress(KEYS[2:], "int8", dry_run=False)
        await node.compressor.compress(KEYS, "int8", dry_run=False)
        assert (await node.compressor.compress(KEYS, "fp8", dry_run=False)).made == 0
        with pytest.raises(InvalidRequest, match="never encoded again"):
            await node.compressor.compress([copy_key(KEYS[0], "int8")], "fp8", dry_run=False)


async def test_a_value_that_is_not_finite_ends_the_copies_before_it(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        blocks = [(key, values(key).reshape(-1).copy()) for key in KEYS]
        blocks[2][1][7] = np.inf
        assert await client.publish([(key, block.view(np.uint8)) for key, block in blocks], None, ALICE) == 5
        done = await node.compressor.compress(KEYS, "int8", dry_run=False)
        assert (done.made, done.kept) == (2, 2)
        assert findable(node, KEYS) == 5
        assert node.numbers()["reservations"] == 0


@pytest.mark.parametrize("where", ["source", "copy"])
async def test_a_flipped_bit_is_found_before_anything_is_encoded_or_decoded(tmp_path: Path, where: str) -> None:
    async with store_node(settings(tmp_path), Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        if where == "copy":
            await node.compressor.compress(KEYS, "int8", dry_run=False)
        name = copy_key(KEYS[3], "int8") if where == "copy" else KEYS[3]
        entry = node.pool.held.index.get(name)
        assert entry is not None
        ref = node.pool.slots.ref(entry.slot, name)
        node.regions.views[ref.region][ref.offset + 100] ^= 1
        if where == "copy":
            ticket = await client.pin(KEYS, ALICE, LOAD_MS)
            assert len(ticket.slots) == 3
            await client.unpin(ticket)
        else:
            assert (await node.compressor.compress(KEYS, "int8", dry_run=False)).made == 3
        assert node.numbers()["digest_mismatches_codec"] == 1
        assert findable(node, [name]) == 0
        assert (node.numbers()["pins"], node.numbers()["reservations"]) == (0, 0)


async def test_decoded_blocks_are_evicted_like_others_and_made_again(tmp_path: Path) -> None:
    async with store_node(settings(tmp_path, slots=11), Roll()) as node:
        async with worker(node) as (client, _):
            await publish(client, KEYS)
            await node.compressor.compress(KEYS, "int8", dry_run=False)
            await client.unpin(await client.pin(KEYS, ALICE, LOAD_MS))
            node.pool.clear([read_key(KEYS[0], "int8")])
            ticket = await client.pin(KEYS, ALICE, LOAD_MS)
            require_near(read(client, ticket, 4), KEYS[4])
            assert node.numbers()["lossy_copies_decoded"] == 10
            await client.unpin(ticket)


async def test_copies_go_down_to_ssd_and_serve_from_there_also_after_a_restart(tmp_path: Path) -> None:
    ssd = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 16 << 20, "demote_below": 0.5, "demote_until": 0.75}
    given = config(tmp_path, store={"codecs": ("int8",), "lossy_for": ("alice",), **ssd})
    names = [copy_key(key, "int8") for key in KEYS]
    async with store_node(given, Roll()) as node, worker(node) as (client, _):
        await publish(client, KEYS)
        await node.compressor.compress(KEYS, "int8", dry_run=False)
        turn = 0
        while len(node.pool.on_ssd(names)) < 5:  # other blocks take the room
            turn += 1
            assert turn < 60
            await publish(client, block_keys(f"other{turn}-", 4), use=BOB)
            await until(lambda: node.numbers()["demotions_open"] == 0, "nothing is on its way down")
        ticket = await client.pin(KEYS, ALICE, LOAD_MS)
        require_near(read(client, ticket, 4), KEYS[4])
        await client.unpin(ticket)
    async with store_node(given, Roll()) as node, worker(node) as (client, _):
        assert len(node.pool.on_ssd(names)) == 5
        assert (await client.pin(KEYS, BOB, LOAD_MS)).slots == ()
        ticket = await client.pin(KEYS, ALICE, LOAD_MS)
        assert len(ticket.slots) == 5
        for i, key in enumerate(KEYS):
            require_near(read(client, ticket, i), key)
        await client.unpin(ticket)


async def test_readers_of_the_same_copies_at_once_all_get_them_and_each_is_decoded_once(tmp_path: Path) -> None:
    keys = block_keys("many", 40)
    async with store_node(settings(tmp_path, slots=96), Roll()) as node, worker(node) as (client, _):
        await publish(client, keys)
        await node.compressor.compress(keys, "int8", dry_run=False)
        tickets = await asyncio.gather(*(client.pin(keys[:n], ALICE, LOAD_MS) for n in (40, 7, 40, 23)))
        assert [len(ticket.slots) for ticket in tickets] == [40, 7, 40, 23]
        assert node.numbers()["lossy_copies_decoded"] == 40
        for ticket in tickets:
            require_near(read(client, ticket, len(ticket.slots) - 1), keys[len(ticket.slots) - 1])
            await client.unpin(ticket)
