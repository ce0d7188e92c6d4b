"""Landings and fetches over UCX between store nodes and writers of this process, over TCP loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member, store_node, worker

from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId, Role
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pusher import Pusher, PushLanding

TAIL = 5
PAGES = np.random.default_rng(5).integers(0, 255, (8, LAYOUT.layers, LAYOUT.slice_bytes), dtype=np.uint8)


@asynccontextmanager
async def pusher_of(roll: Roll, node: StoreNode) -> AsyncIterator[Pusher]:
    me = member("prefill-0", Role.PREFILL, "z")
    roll.say(me)
    one = Pusher(me, LAYOUT, PAGES, node.config.transfer)
    one.prepare()
    try:
        yield one
    finally:
        await one.close()


async def grant(pusher: Pusher, node: StoreNode, name: str, keys: list[bytes], tail: int) -> PushLanding:
    request = Request(RequestId(name), (1,), SamplingParams(max_tokens=1), bytes(16), ())
    return await pusher.grant(
        node.member,
        Attempt(request, 1),
        keys,
        first_block=0,
        tail_valid=tail,
        reader=MemberId("decode-0"),
        reader_incarnation=Incarnation(1),
    )


def push(landing: PushLanding, layers: range = range(LAYOUT.layers)) -> None:
    for layer in layers:
        landing.push_layer(0, layer, [(slot.block, slot.block, slot.valid) for slot in landing.landing.slots])


async def test_prompts_with_tails_land_over_ucx_and_what_really_carried_them_is_named(tmp_path: Path) -> None:
    roll = Roll()
    settings = config(tmp_path, transfer={"carrier": "ucx"})
    async with store_node(settings, roll) as node, worker(node) as (client, heard), pusher_of(roll, node) as pusher:
        landings = [await grant(pusher, node, f"r{i}", block_keys(f"k{i}", 2), TAIL) for i in range(3)]
        for landing in landings:
            await asyncio.to_thread(push, landing)
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        for landing in landings:
            drained = await landing.drain()
            assert landing.failure is None
            assert drained.carrier == "ucx"
            for slot in landing.landing.slots:
                for layer in range(LAYOUT.layers):
                    client.read_slice(slot.slot, layer, into, slot.valid)
                    for offset, length in LAYOUT.pieces(slot.valid):
                        assert (into[offset : offset + length] == PAGES[slot.block, layer, offset : offset + length]).all()
            await client.end_landing(landing.landing.id)
        assert len(heard.landed) == 3 * LAYOUT.layers
        assert pusher.carriers() == "ucx (tcp)"
        assert node.words()["ucx_transport"] == "tcp"
        assert node.numbers()["receiver_open"] == 0
        assert node.numbers()["slots_reserved"] == 0


async def test_an_endpoint_made_anew_under_load_loses_nothing(tmp_path: Path) -> None:
    roll = Roll()
    settings = config(tmp_path, slots=64, transfer={"carrier": "ucx"})
    async with store_node(settings, roll) as node, worker(node) as (client, _), pusher_of(roll, node) as pusher:
        landings = [await grant(pusher, node, f"r{i}", block_keys(f"k{i}", 7), TAIL) for i in range(4)]
        for i, landing in enumerate(landings):
            await asyncio.to_thread(push, landing)
            if i in (0, 2):
                await node.remake()
        for landing in landings:
            await asyncio.wait_for(landing.drain(), 30)
            assert landing.failure is None
            assert await client.lookup([slot.slot.key for slot in landing.landing.slots[:-1]]) == 7
            await client.end_landing(landing.landing.id)
        assert node.generation == 3
        assert node.numbers()["slots_fenced"] == 0
        assert node.numbers()["slots_reserved"] == 0


async def test_blocks_are_fetched_from_another_node_over_ucx(tmp_path: Path) -> None:
    roll = Roll()
    settings = config(tmp_path, transfer={"carrier": "ucx"})
    async with store_node(settings, roll, "a") as here, store_node(settings, roll, "b") as there:
        async with worker(here) as (client, _), worker(there, "decode-1") as (other, _):
            keys = block_keys("k", 3)
            await other.publish([(key, block_bytes(key)) for key in keys])
            fetched = await client.fetch(keys, NodeId("b"), there.member.address, 10_000)
            assert [slot.key for slot in fetched.ticket.slots] == keys
            assert fetched.carrier == "ucx"
            assert 3 * LAYOUT.block_bytes < fetched.bytes < 3 * LAYOUT.block_bytes + LAYOUT.layers * 400
            block = np.empty(LAYOUT.block_bytes, np.uint8)
            for slot in fetched.ticket.slots:
                for layer in range(LAYOUT.layers):
                    start = layer * LAYOUT.slice_bytes
                    client.read_slice(slot, layer, block[start : start + LAYOUT.slice_bytes], LAYOUT.block_tokens)
                assert (block == block_bytes(slot.key)).all()
            await client.unpin(fetched.ticket)
            assert here.numbers()["slots_reserved"] == 0
            assert here.numbers()["receiver_open"] == 0
            assert there.numbers()["pins"] == 0


async def test_shared_memory_lanes_between_node_ids_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roll = Roll()
    async with store_node(config(tmp_path), roll) as node:
        pusher = Pusher(
            member("prefill-0", Role.PREFILL, "z"), LAYOUT, PAGES, config(tmp_path, transfer={"carrier": "ucx"}).transfer
        )
        monkeypatch.setenv("UCX_TLS", "all")
        with pytest.raises(ConfigError, match="ucx_tls: 'all' between two node ids on one machine"):
            await grant(pusher, node, "r", block_keys("k", 1), 0)
        assert node.numbers()["slots_free"] == 16
