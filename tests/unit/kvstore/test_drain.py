"""Nodes that leave, come and die while others hold, copy and read their blocks."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.store import LAYOUT, block_bytes
from support.stores import block_keys, stores, until

from moonpool.core.membership import Liveness
from moonpool.core.use import Use
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces, Sender
from moonpool.wire import pb


async def test_a_leaving_node_copies_what_only_it_holds_and_the_others_have_every_byte(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", "c", slots=32) as s:
        shared, mine = block_keys("s", 4), block_keys("m", 6)
        await s.publish("a", shared)
        await s.publish("b", shared)
        await s.publish("a", mine)
        await s.publish("a", block_keys("t", 3), parent=shared[-1])
        report = await s.nodes["a"].leave()
        assert (report.blocks_saved, report.bytes_saved) == (9, 9 * LAYOUT.slot_bytes)
        assert (report.blocks_left, report.bytes_left) == (0, 0)
        await s.require_right("b", [*shared, *block_keys("t", 3)])
        holder = "b" if await s.workers["b"].lookup(mine) else "c"
        await s.require_right(holder, mine)
        assert sum([await s.workers[n].lookup(shared) for n in "bc"]) == 4, "what was safe was not moved"
        again = await s.nodes["a"].leave()
        assert again == report
        await s.require_idle()


@pytest.mark.parametrize("seed", range(3))
async def test_trees_of_prefixes_that_are_partly_elsewhere_are_saved_whole(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with stores(tmp_path, "a", "b", "c", slots=64) as s:
        paths = [tuple[bytes, ...]()]
        for i in range(12):
            begin = rng.choice(paths)
            branch = block_keys(f"{i}-", rng.randint(1, 3))
            await s.publish("a", branch, parent=begin[-1] if begin else None)
            paths += [(*begin, *branch[:n]) for n in range(1, len(branch) + 1)]
        for node in ("b", "c"):
            path = rng.choice(paths[1:])
            await s.publish(node, path[: rng.randint(1, len(path))])
        elsewhere = set().union(*(s.nodes[node].pool.held.index.keys() for node in ("b", "c")))
        report = await s.nodes["a"].leave()
        assert (report.blocks_saved, report.blocks_left) == (len(paths) - 1 - len(elsewhere), 0)
        for path in paths[1:]:
            holder = "b" if await s.workers["b"].lookup(path) == len(path) else "c"
            await s.require_right(holder, path)
        await s.require_idle()


async def test_a_copy_is_on_the_account_of_the_tenant_whose_block_it_is(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b") as s:
        keys = block_keys("k", 2)
        await s.workers["a"].publish([(key, block_bytes(key)) for key in keys], use=Use("acme"))
        assert (await s.nodes["a"].leave()).blocks_saved == 2
        copy = s.nodes["b"].pool.held.index.get(keys[1])
        assert copy is not None
        assert copy.use.tenant == "acme"


async def test_a_leaving_node_serves_reads_and_refuses_new_blocks(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b") as s:
        keys = block_keys("k", 3)
        await s.publish("a", keys)
        s.gate.clear()
        leaving = asyncio.create_task(s.nodes["a"].leave())
        await until(lambda: bool(s.orders), "it copies")
        await s.require_right("a", keys)
        assert await s.workers["a"].publish([]) == 0
        reply = await s.workers["a"]._stub.Reserve(
            pb.store.KeysRequest(session=s.workers["a"]._number, keys=block_keys("n", 2))
        )
        assert [one.state for one in reply.reservations] == ["full", "full"]
        await s.publish("b", block_keys("x", 1))
        assert (await s.fetch("a", block_keys("x", 1), "b")).slots == ()
        answer = await s.workers["a"]._stub.Exists(pb.store.KeysRequest(keys=keys))
        assert answer.leaving
        s.gate.set()
        assert (await leaving).blocks_saved == 3


async def test_without_room_elsewhere_the_hottest_blocks_are_saved_and_the_rest_is_reported(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", slots=8) as s:
        cold, hot = block_keys("c", 4), block_keys("h", 3)
        await s.publish("a", cold)
        await s.publish("a", hot)
        await s.publish("b", block_keys("x", 4))
        held = await s.workers["b"].pin(block_keys("x", 4))
        await s.workers["a"].unpin(await s.workers["a"].pin(hot))
        report = await s.nodes["a"].leave()
        assert (report.blocks_saved, report.blocks_left) == (3, 4)
        await s.require_right("b", hot)
        await s.workers["b"].unpin(held)
        assert await s.workers["b"].lookup(block_keys("x", 4)) == 4


async def test_a_drain_ends_in_time_when_the_other_node_takes_no_bytes(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", store={"drain_ms": 300}) as s:
        await s.publish("a", block_keys("k", 3))
        s.gate.clear()
        async with asyncio.timeout(5):
            report = await s.nodes["a"].leave()
        assert (report.blocks_saved, report.blocks_left) == (0, 3)
        s.gate.set()
        await s.require_idle()


class Stalling:
    """A sending end whose pushes to one node never end."""

    def __init__(self, inner: Sender, node: str) -> None:
        self._inner, self._node = inner, node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        return Future() if target.node == self._node else self._inner.push(target, pieces, frame)


async def test_a_target_that_freezes_costs_a_part_of_the_time_and_another_one_takes_its_blocks(tmp_path: Path) -> None:
    sender: Any = lambda inner: Stalling(inner, "b")  # noqa: E731
    async with stores(tmp_path, "a", "b", "c", sender=sender, store={"drain_ms": 2_000}) as s:
        keys = block_keys("k", 3)
        await s.publish("a", keys)
        report = await s.nodes["a"].leave()
        assert [order.landing.node for order in s.orders] == ["b", "c"]
        assert (report.blocks_saved, report.blocks_left) == (3, 0)
        await s.require_right("c", keys)


async def test_nodes_that_all_leave_at_once_do_not_wait_for_one_another(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", "c") as s:
        for name in s.nodes:
            await s.publish(name, block_keys(name, 3))
        async with asyncio.timeout(5):
            reports = await asyncio.gather(*(node.leave() for node in s.nodes.values()))
        assert [report.blocks_left for report in reports] == [3, 3, 3]


async def test_the_only_node_leaves_at_once_and_says_what_is_lost(tmp_path: Path) -> None:
    async with stores(tmp_path, "a") as s:
        await s.publish("a", block_keys("k", 3))
        reply = await s.workers["a"]._stub.MoveOut(pb.store.MoveOutRequest(deadline_ms=60_000))
        assert (reply.blocks_saved, reply.blocks_left, reply.bytes_left) == (0, 3, 3 * LAYOUT.slot_bytes)
        assert s.nodes["a"].numbers()["drain_blocks_left"] == 3


async def test_nothing_is_copied_to_a_node_that_is_leaving_not_ready_or_silent(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", "c", "d") as s:
        await s.publish("a", block_keys("k", 2))
        await s.nodes["b"].leave()
        s.roll.say(s.nodes["c"].member, Liveness.SILENT)
        s.roll.say(replace(s.nodes["d"].member, ready=False))
        assert (await s.nodes["a"].leave()).blocks_left == 2
        assert s.orders == []
