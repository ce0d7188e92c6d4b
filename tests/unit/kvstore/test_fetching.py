"""Blocks from node to node: two store nodes with real gRPC between them, bytes over the memory carrier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, store_node, until, worker

from moonpool.core.ids import NodeId
from moonpool.core.landing import Ticket
from moonpool.kvstore import slices
from moonpool.kvstore.client import Fetched, WorkerStore
from moonpool.kvstore.fetching import Moved, PushOrder
from moonpool.kvstore.node import StoreNode
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.transfer.memory import Faults, MemoryNetwork

LONG_MS = 20_000


@dataclass
class Scene:
    """``here`` lacks what ``there`` has; ``reader`` is a worker of ``here``, ``author`` one of ``there``."""

    here: StoreNode
    there: StoreNode
    reader: WorkerStore
    author: WorkerStore
    roll: Roll
    orders: list[PushOrder] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, client: WorkerStore, keys: list[bytes]) -> None:
        assert await client.publish([(key, block_bytes(key)) for key in keys]) == len(keys)

    async def fetch(self, keys: list[bytes], deadline_ms: int = LONG_MS, *, move: bool = False) -> Fetched:
        return await self.reader.fetch(keys, NodeId("b"), self.there.member.address, deadline_ms, move=move)

    def require_right(self, ticket: Ticket, keys: list[bytes]) -> None:
        assert [slot.key for slot in ticket.slots] == keys
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        for slot in ticket.slots:
            for layer in range(LAYOUT.layers):
                self.reader.read_slice(slot, layer, into, LAYOUT.block_tokens)
                assert (into == slices.slice_of(LAYOUT, block_bytes(slot.key), 0, layer)).all()

    async def require_idle(self, *tickets: Ticket) -> None:
        for ticket in tickets:
            await self.reader.unpin(ticket)
        names = ("landings_open", "pins", "slots_reserved", "slots_fenced", "fetches_open", "receiver_open")
        for node in (self.here, self.there):
            await until(lambda node=node: not any(node.numbers()[name] for name in names), "the node is idle")


@asynccontextmanager
async def scene(folder: Path, faults: Faults | None = None, *, slots: int = 16) -> AsyncIterator[Scene]:
    network, roll = MemoryNetwork(faults or Faults()), Roll()
    settings = config(folder, slots=slots, transfer={"carrier": "memory"})
    made: list[Scene] = []
    pushers: dict[NodeId, Pusher] = {}

    async def push(order: PushOrder) -> Moved:
        """As the node's own, but over the network of this test, and when the gate is open."""
        made[0].orders.append(order)
        await made[0].gate.wait()
        node = made[0].there
        if node.member.node not in pushers:
            pushers[node.member.node] = Pusher(
                node.member,
                LAYOUT,
                node.regions.views,
                settings.transfer,
                senders=lambda _, __, given, ___: network.sender(given),
            )
        pusher = pushers[node.member.node]
        drained = await pusher.push_blocks(order.landing, order.targets, order.target_address, order.layout, order.blocks)
        return Moved(drained.bytes_sent, drained.carrier)

    parts = {"receivers": lambda _, who, heard: [network.receiver(who, heard("memory"))], "push": push}
    async with store_node(settings, roll, "a", **parts) as here, store_node(settings, roll, "b", **parts) as there:
        async with worker(here) as (reader, _), worker(there, "decode-1") as (author, _):
            made.append(Scene(here, there, reader, author, roll))
            made[0].gate.set()
            try:
                yield made[0]
            finally:
                for pusher in pushers.values():
                    await pusher.close()


async def test_only_what_is_lacking_is_moved_and_all_of_it_is_pinned(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 5)
        await s.publish(s.reader, keys[:2])
        await s.publish(s.author, keys)
        fetched = await s.fetch(keys)
        s.require_right(fetched.ticket, keys)
        assert 3 * LAYOUT.block_bytes < fetched.bytes < 3 * LAYOUT.block_bytes + LAYOUT.layers * 400
        assert fetched.carrier == "memory"
        again = await s.fetch(keys)
        assert (again.bytes, again.carrier) == (0, "")
        assert len(s.orders) == 1
        assert await s.reader.lookup(keys) == 5
        await s.require_idle(fetched.ticket, again.ticket)


@pytest.mark.parametrize("move", [False, True])
async def test_what_was_moved_goes_first_where_it_came_from(tmp_path: Path, move: bool) -> None:
    async with scene(tmp_path, slots=8) as s:
        old, moved = block_keys("old", 3), block_keys("moved", 5)
        await s.publish(s.author, old)
        await s.publish(s.author, moved)
        await s.publish(s.reader, moved[:1])
        fetched = await s.fetch(moved, move=move)
        s.require_right(fetched.ticket, moved)
        await s.require_idle(fetched.ticket)
        assert s.there.numbers().get("cooled", 0) == (5 if move else 0), "the reader has the first one, too"
        await s.publish(s.author, block_keys("new", 3))
        assert [await s.author.lookup(keys) for keys in (old, moved)] == ([3, 2] if move else [0, 5])


async def test_what_could_not_be_moved_keeps_its_place(tmp_path: Path) -> None:
    async with scene(tmp_path, Faults(cut=frozenset(range(1_000)))) as s:
        keys = block_keys("k", 3)
        await s.publish(s.author, keys)
        fetched = await s.fetch(keys, move=True)
        assert len(fetched.ticket.slots) < 3
        assert s.there.numbers().get("cooled", 0) == 0


async def test_a_node_that_has_less_than_it_was_thought_to_gives_what_it_has(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 5)
        await s.publish(s.author, keys[:3])
        some = await s.fetch(keys)
        s.require_right(some.ticket, keys[:3])
        none = await s.fetch(block_keys("x", 2))
        assert none.ticket.slots == ()
        await s.require_idle(some.ticket)
        assert s.here.numbers()["slots_sealed"] == 3


async def test_concurrent_fetches_of_one_prompt_share_one_push(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 5)
        await s.publish(s.author, keys)
        s.gate.clear()
        short = [asyncio.create_task(s.fetch(keys[:3])) for _ in range(3)]
        await until(lambda: len(s.orders) == 1, "the first one pushes")
        long = asyncio.create_task(s.fetch(keys))
        await until(lambda: len(s.orders) == 2, "the longer one pushes the rest")
        s.gate.set()
        results = await asyncio.gather(*short, long)
        for result in results[:3]:
            s.require_right(result.ticket, keys[:3])
        s.require_right(results[3].ticket, keys)
        assert [[to.block for _, to in order.blocks] for order in s.orders] == [[0, 1, 2], [3, 4]]
        await s.require_idle(*(r.ticket for r in results))


async def test_the_deadline_gives_what_is_here_and_the_late_slots_are_fenced_until_drained(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 4)
        await s.publish(s.reader, keys[:1])
        await s.publish(s.author, keys)
        s.gate.clear()
        fetched = await s.fetch(keys, deadline_ms=200)
        s.require_right(fetched.ticket, keys[:1])
        await until(lambda: s.here.numbers()["slots_fenced"] == 3, "its slots are fenced")
        assert s.there.numbers()["pins"] == 4 - 1, "still being pushed"
        s.gate.set()
        await s.require_idle(fetched.ticket)


async def test_a_reader_that_gives_up_leaves_nothing_pinned(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 3)
        await s.publish(s.author, keys)
        s.gate.clear()
        fetching = asyncio.create_task(s.fetch(keys))
        await until(lambda: len(s.orders) == 1, "the push waits")
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        s.gate.set()
        await until(lambda: s.here.numbers()["slots_sealed"] == 3, "what came is kept")
        await s.require_idle()


async def test_a_session_that_ends_meanwhile_pins_nothing_afterwards(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 3)
        await s.publish(s.author, keys)
        s.gate.clear()
        fetching = asyncio.create_task(s.fetch(keys))
        await until(lambda: len(s.orders) == 1, "the push waits")
        for session in s.here.sessions:
            s.here.sessions.end(session, "the test says so")
        s.gate.set()
        await asyncio.gather(fetching, return_exceptions=True)
        await s.require_idle()


async def test_a_copy_that_went_bad_is_quarantined_where_it_lies_and_does_not_travel(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        keys = block_keys("k", 4)
        await s.publish(s.author, keys)
        ticket = await s.author.pin(keys)
        bad = ticket.slots[2]
        s.author.regions[bad.region][bad.offset + 11] ^= 1
        await s.author.unpin(ticket)
        fetched = await s.fetch(keys)
        s.require_right(fetched.ticket, keys[:2])
        assert await s.author.lookup(keys) == 2
        assert s.there.numbers()["digest_mismatches_push"] == 1
        await s.require_idle(fetched.ticket)


async def test_a_slice_that_is_damaged_on_the_way_comes_again(tmp_path: Path) -> None:
    async with scene(tmp_path, Faults(corrupt=frozenset({0}))) as s:
        keys = block_keys("k", 3)
        await s.publish(s.author, keys)
        fetched = await s.fetch(keys)
        s.require_right(fetched.ticket, keys)
        assert s.here.numbers()["digest_mismatches_landing"] == 1
        await s.require_idle(fetched.ticket)


async def test_a_node_without_room_or_without_that_peer_answers_with_what_it_has(tmp_path: Path) -> None:
    async with scene(tmp_path, slots=4) as s:
        mine, theirs = block_keys("m", 4), block_keys("k", 4)
        await s.publish(s.reader, mine)
        await s.publish(s.author, theirs)
        held = await s.reader.pin(mine)
        assert (await s.fetch(theirs)).ticket.slots == ()
        assert s.here.numbers()["fetches_failed"] == 1
        await s.reader.unpin(held)
        unknown = await s.reader.fetch(theirs, NodeId("nobody"), "127.0.0.1:1", LONG_MS)
        assert unknown.ticket.slots == ()
        fetched = await s.fetch(theirs)
        s.require_right(fetched.ticket, theirs)
        await s.require_idle(fetched.ticket)
