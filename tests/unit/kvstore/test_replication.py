"""Copies of blocks at several nodes: on request and by heat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.store import LAYOUT, member
from support.stores import Stores, block_keys, stores, until

from moonpool.core.ids import Role
from moonpool.wire import pb
from moonpool.wire.convert import to_wire


def stub(s: Stores, node: str) -> Any:
    """The worker's own stub: its channel ends with the worker."""
    return s.workers[node]._stub


async def replicate(s: Stores, to: str, keys: list[bytes], source: str, deadline_ms: int = 20_000) -> Any:
    request = pb.store.ReplicateRequest(
        keys=keys, node=source, deadline_ms=deadline_ms, layout=to_wire(LAYOUT, pb.types.KVLayout())
    )
    return await stub(s, to).Replicate(request)


async def exists(s: Stores, node: str, keys: list[bytes]) -> list[bool]:
    reply = await stub(s, node).Exists(pb.store.KeysRequest(keys=keys))
    return [bool(bit) for bit in np.unpackbits(np.frombuffer(reply.bits, np.uint8), bitorder="little")[: len(keys)]]


async def test_a_node_copies_blocks_from_another_on_request_and_keeps_them_without_a_reader(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b") as s:
        keys = block_keys("k", 5)
        await s.publish("b", keys[:2])
        await s.publish("a", keys)
        reply = await replicate(s, "b", keys, "a")
        assert (reply.blocks, reply.carrier) == (5, "memory")
        assert reply.bytes > 3 * LAYOUT.block_bytes
        await s.require_right("b", keys)
        again = await replicate(s, "b", keys, "a")
        assert (again.blocks, again.bytes, len(s.orders)) == (5, 0, 1)
        await s.require_idle()


async def test_a_copy_larger_than_the_room_left_takes_its_leading_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.kvstore.fetching.PIECE", 4)
    async with stores(tmp_path, "a", "b") as s:
        keys, mine = block_keys("k", 12), block_keys("m", 10)
        await s.publish("a", keys)
        await s.publish("b", mine)
        held = await s.workers["b"].pin(mine)
        reply = await replicate(s, "b", keys, "a")
        assert reply.blocks == 4
        await s.workers["b"].unpin(held)
        assert (await replicate(s, "b", keys, "a")).blocks == 12
        await s.require_right("b", keys)
        await s.require_idle()


async def test_a_copy_from_nobody_or_of_nothing_leaves_nothing_behind(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b") as s:
        assert (await replicate(s, "b", block_keys("k", 3), "a")).blocks == 0
        assert (await replicate(s, "b", block_keys("k", 3), "nobody")).blocks == 0
        for bad in ({"node": "b"}, {"deadline_ms": 0}, {"keys": [b"short"]}):
            request = pb.store.ReplicateRequest(**{"keys": block_keys("k", 1), "node": "a", "deadline_ms": 100} | bad)
            to_wire(LAYOUT, request.layout)
            with pytest.raises(grpc.aio.AioRpcError, match=next(iter(bad))):
                await stub(s, "b").Replicate(request)
        await s.require_idle()


async def test_existence_is_asked_per_key_not_per_prefix_and_comes_with_the_room_there_is(tmp_path: Path) -> None:
    async with stores(tmp_path, "a") as s:
        keys = block_keys("k", 3)
        await s.publish("a", keys)
        assert await exists(s, "a", [*block_keys("x", 8), *keys[1:]]) == [False] * 8 + [True, True]
        held = await s.workers["a"].pin(keys[:1])
        reply = await stub(s, "a").Exists(pb.store.KeysRequest())
        assert (reply.bits, reply.leaving) == (b"", False)
        assert reply.free_bytes == 13 * LAYOUT.slot_bytes
        assert reply.evictable_bytes == 2 * LAYOUT.slot_bytes
        await s.workers["a"].unpin(held)


async def test_a_prefix_that_others_read_often_gets_one_more_copy_where_most_room_is(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", "c", "d", store={"replicate_after": 2}) as s:
        keys = block_keys("k", 4)
        await s.publish("a", keys)
        await s.publish("c", block_keys("x", 5))
        await s.fetch("b", keys, "a")
        assert s.nodes["a"].numbers()["heat_copies"] == 0
        await s.workers["b"]._stub.Clear(pb.store.KeysRequest())
        await s.publish("b", block_keys("y", 9))
        await s.fetch("b", keys[:3], "a")
        await until(lambda: s.nodes["d"].numbers()["blocks_findable"] == 3, "the emptiest node has what is hot")
        await s.require_right("d", keys[:3])
        assert [await s.workers[n].lookup(keys) for n in "bc"] == [3, 0]
        await until(lambda: s.nodes["a"].numbers()["heat_bytes"] > 3 * LAYOUT.block_bytes, "it counts what it moved")
        assert s.nodes["a"].numbers()["heat_copies"] == 1, "the copy itself is no read"
        await s.require_idle()


async def test_copies_by_heat_are_off_unless_asked_for(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", "c") as s:
        keys = block_keys("k", 2)
        await s.publish("a", keys)
        for _ in range(5):
            await s.fetch("b", keys, "a")
            await stub(s, "b").Clear(pb.store.KeysRequest())
        assert s.nodes["a"].numbers()["heat_blocks"] == 0
        assert await s.workers["c"].lookup(keys) == 0


async def test_what_a_conductor_asks_that_leads_no_more_is_refused_and_an_operator_never(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b") as s:
        keys = block_keys("k", 2)
        await s.publish("a", keys)
        asked = stub(s, "b")

        def copy(term: int) -> Any:
            request = pb.store.ReplicateRequest(keys=keys, node="a", deadline_ms=5_000, term=term)
            to_wire(LAYOUT, request.layout)
            return asked.Replicate(request)

        s.roll.say(replace(member("conductor-1", Role.CONDUCTOR, "a"), term=4))
        over = pb.store.WarmRequest(keys=keys, deadline_ms=5_000, term=3)
        to_wire(LAYOUT, over.layout)
        for call in (copy(3), asked.Warm(over), asked.Cool(pb.store.KeysRequest(keys=keys, term=3))):
            with pytest.raises(grpc.aio.AioRpcError, match="term: 3 is over, 4 has begun"):
                await call
        assert await exists(s, "b", keys) == [False, False]
        assert (await copy(4)).blocks == 2
        assert (await copy(5)).blocks == 2
        with pytest.raises(grpc.aio.AioRpcError, match="4 is over, 5 has begun"):
            await copy(4)
        assert (await copy(0)).blocks == 2
        await s.require_idle()
