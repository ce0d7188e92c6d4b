"""Peers that take a connection and then do not behave: each costs its own callers a bounded time, and nobody else anything."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member, store_node, until, worker
from support.stores import stores

from moonpool.cluster.conductor import ConductorService
from moonpool.core.errors import PeerSilent, TransferFailed
from moonpool.core.ids import NodeId, RequestId, Role
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.kvstore import push_target
from moonpool.kvstore.pusher import Pusher
from moonpool.kvstore.sources import PACE

KINDS = ("never accepts", "never answers", "answers half a header", "closes after accept")
HALF_A_HEADER = b"\x00\x00\x12\x04"  # of an HTTP/2 SETTINGS frame


class Peer:
    def __init__(self) -> None:
        self.address = ""
        self.connections = 0


@asynccontextmanager
async def peer(kind: str) -> AsyncIterator[Peer]:
    made, over = Peer(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        if kind == "answers half a header":
            writer.write(HALF_A_HEADER)
        if kind != "closes after accept":
            await over.wait()
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        made.address = f"127.0.0.1:{listening.getsockname()[1]}"
        if kind == "never accepts":
            yield made
            return
        server = await asyncio.start_server(serve, sock=listening)
        try:
            yield made
        finally:
            over.set()
            server.close()
            await server.wait_closed()


async def test_fetches_from_peers_that_do_not_answer_end_at_their_deadline_and_hold_up_no_other(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", slots=64) as s, AsyncExitStack() as stack:
        keys = block_keys("k", 4)
        await s.publish("b", keys)
        waiting = []
        for i, kind in enumerate(KINDS):
            half = await stack.enter_async_context(peer(kind))
            s.roll.say(member(f"store-h{i}", Role.STORE, f"h{i}", address=half.address))
            fetch = s.workers["a"].fetch(block_keys(f"h{i}", 4), NodeId(f"h{i}"), half.address, 1_500)
            waiting.append(asyncio.create_task(fetch))
        await until(
            lambda: s.nodes["a"].numbers()["slots_reserved"] + s.nodes["a"].numbers()["slots_fenced"] == 16, "all are asked"
        )
        assert [slot.key for slot in (await s.fetch("a", keys, "b")).slots] == keys
        assert sum(task.done() for task in waiting) < 2, "the healthy one did not wait for the others"
        async with asyncio.timeout(10):
            results = await asyncio.gather(*waiting)
        assert [result.ticket.slots for result in results] == [()] * len(KINDS)
        await until(lambda: s.nodes["a"].numbers()["slots_fenced"] == 4 * len(KINDS), "they were told of slots, and may write")
        for i in range(len(KINDS)):
            s.roll.say(member(f"store-h{i}", Role.STORE, f"h{i}", incarnation=2))
        await s.require_idle()


async def test_a_node_from_which_nothing_comes_is_a_miss_at_once_until_it_answers_a_probe(tmp_path: Path) -> None:
    async with stores(tmp_path, "a", "b", slots=64) as s, peer("closes after accept") as half:
        await s.publish("b", block_keys("k", 2))
        well = s.nodes["b"].member
        s.roll.say(replace(well, address=half.address))
        lost = block_keys("x", PACE.failures + 1)
        for key in lost[:-1]:
            assert (await s.workers["a"].fetch([key], NodeId("b"), half.address, 1_000)).ticket.slots == ()
        before = half.connections
        assert (await s.workers["a"].fetch(lost[-1:], NodeId("b"), half.address, 1_000)).ticket.slots == ()
        assert s.nodes["a"].numbers()["fetches_not_tried"] == 1
        assert half.connections == before
        s.roll.say(well)
        async with asyncio.timeout(5):
            while not (await s.fetch("a", block_keys("k", 2), "b")).slots:
                pass
        s.roll.say(member("store-b", Role.STORE, "b", incarnation=9))


async def grant_refused(folder: Path, kind: str) -> str:
    """How a writer fares that asks such a peer for slots."""
    request = Request(RequestId("r"), (1,) * 32, SamplingParams(max_tokens=1), b"n" * 16, tuple(block_keys("k", 2)))
    me, page = member("prefill-0", Role.PREFILL, "a"), block_bytes(b"x" * 16).reshape(1, LAYOUT.layers, LAYOUT.slice_bytes)
    async with peer(kind) as half:
        store = member("store-b", Role.STORE, "b", address=half.address)
        pusher = Pusher(me, LAYOUT, page, config(folder, transfer={"carrier": "tcp"}).transfer)
        try:
            with pytest.raises((PeerSilent, TransferFailed)) as refused:
                await pusher.grant(
                    store,
                    Attempt(request, 1),
                    request.keys,
                    first_block=0,
                    tail_valid=0,
                    reader=me.id,
                    reader_incarnation=me.incarnation,
                )
        finally:
            await pusher.close()
    return refused.value.message


async def test_a_writer_gives_a_node_up_that_does_not_answer(tmp_path: Path) -> None:
    async with asyncio.timeout(push_target.CALL_S + 3):
        told = await asyncio.gather(*(grant_refused(tmp_path, kind) for kind in KINDS))
    assert all("store-b" in message for message in told), told


async def test_a_conductor_tries_a_peer_that_closes_at_once_again_but_not_in_a_hurry(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(tmp_path), roll) as node, worker(node) as (client, _), peer("closes after accept") as half:
        service = await ConductorService.start(config(tmp_path), member("conductor-0", Role.CONDUCTOR, "a"), roll)
        try:
            roll.say(member("store-h", Role.STORE, "h", address=half.address))
            await until(lambda: service.numbers()["store_watch_reconnects"] >= 3, "it tries again")
            await client.publish([(key, block_bytes(key)) for key in block_keys("k", 2)])
            await until(lambda: service.numbers()["blocks_indexed"] == 2, "the others are heard meanwhile")
            before = half.connections
            await asyncio.sleep(0.5)
            assert half.connections - before <= 5
        finally:
            await service.close()


async def test_two_hundred_connections_that_say_nothing_leave_a_node_to_its_workers(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _):
        host, port = node.member.address.split(":")
        idle = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(200)))
        keys = block_keys("k", 2)
        assert await client.publish([(key, block_bytes(key)) for key in keys]) == 2
        async with worker(node, "decode-1") as (late, _):
            assert await late.lookup(keys) == 2
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in idle))
