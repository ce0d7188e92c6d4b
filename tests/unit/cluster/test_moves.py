"""Copies, prefetches and coolings that a conductor asks of store nodes: bounded, counted, never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from support.leading import Leading
from support.scripted_cluster import LAYOUT, Membership

from moonpool.cluster.moves import QUEUED, Move, Moves
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member
from moonpool.scheduler.actions import Cool, Prefetch, Replicate
from moonpool.wire import channels, pb

KEYS = tuple(bytes([i]).ljust(16, b"k") for i in range(4))
A, B = NodeId("a"), NodeId("b")


@dataclass
class Store(pb.store_rpc.StoreServicer):
    """Does what it is told and waits for ``open`` before it answers."""

    told: list[tuple[str, int]] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    terms: list[int] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def _take(self, what: str, keys: int) -> None:
        self.told.append((what, keys))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.open.wait()
        self.at_once -= 1

    async def Replicate(self, request: Any, context: Any) -> pb.store.ReplicateReply:
        await self._take(f"replicate from {request.node}", len(request.keys))
        return pb.store.ReplicateReply(blocks=len(request.keys), bytes=1_000, carrier="tcp")

    async def Warm(self, request: Any, context: Any) -> pb.store.ReplicateReply:
        await self._take("warm", len(request.keys))
        self.terms.append(request.term)
        return pb.store.ReplicateReply(blocks=len(request.keys), bytes=10)

    async def Cool(self, request: Any, context: Any) -> pb.store.CoolReply:
        await self._take("cool", len(request.keys))
        return pb.store.CoolReply(blocks=len(request.keys))


@asynccontextmanager
async def moving(at_once: int = 2, leads: Leading | None = None) -> AsyncIterator[tuple[Moves, Store, Membership]]:
    store, server, peers = Store(), channels.server(), Membership()
    pb.store_rpc.add_StoreServicer_to_server(store, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peers.say(Member(MemberId("store-b"), Role.STORE, B, Incarnation(1), f"127.0.0.1:{port}", 1, layout=LAYOUT))
    moves = Moves(peers, at_once, leads or Leading())
    yield moves, store, peers
    await moves.close()
    await server.stop(None)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_each_kind_reaches_the_store_node_that_it_is_for() -> None:
    async with moving() as (moves, store, _):
        store.open.set()
        every: list[Move] = [Replicate(A, B, KEYS), Prefetch(B, KEYS[:2]), Cool(B, KEYS[:1])]
        for move in every:
            moves.take(move)
        await until(lambda: moves.counts["done"] == 3)
        assert sorted(store.told) == [("cool", 1), ("replicate from a", 4), ("warm", 2)]
        numbers = moves.numbers()
        assert (numbers["moves_blocks"], numbers["moves_bytes"], numbers["moves_running"]) == (6, 1_010, 0)


async def test_so_many_run_at_once_the_others_wait_and_what_is_too_much_is_dropped() -> None:
    async with moving(at_once=2) as (moves, store, _):
        for _ in range(QUEUED + 10):
            moves.take(Prefetch(B, KEYS))
        await until(lambda: len(store.told) == 2)
        numbers = moves.numbers()
        assert (numbers["moves_running"], numbers["moves_queued"]) == (2, QUEUED)
        assert numbers["moves_dropped"] == 8
        store.open.set()
        await until(lambda: moves.counts["done"] == QUEUED + 2)
        assert store.most_at_once == 2


async def test_failures_are_counted_and_the_next_one_goes_on() -> None:
    async with moving(at_once=1) as (moves, store, peers):
        store.open.set()
        peers.say(Member(MemberId("store-a"), Role.STORE, A, Incarnation(1), "127.0.0.1:1", 1, layout=LAYOUT))
        moves.take(Prefetch(NodeId("nowhere"), KEYS))
        moves.take(Replicate(B, A, KEYS))  # nobody listens there
        moves.take(Cool(B, KEYS))
        await until(lambda: moves.counts["done"] == 1)
        assert moves.counts["failed"] == 2


async def test_none_are_made_where_none_are_wanted_and_a_leaving_conductor_drops_them() -> None:
    async with moving(at_once=0) as (moves, store, _):
        moves.take(Prefetch(B, KEYS))
        assert moves.counts["dropped"] == 1
    async with moving() as (moves, store, _):
        moves.take(Prefetch(B, KEYS))
        await until(lambda: len(store.told) == 1)
        await moves.close()
        assert moves.numbers()["moves_running"] == 0


async def test_what_another_conductor_leads_is_left_to_it_also_where_it_was_queued_already() -> None:
    leads = Leading(3)
    async with moving(at_once=1, leads=leads) as (moves, store, _):
        for _ in range(2):
            moves.take(Prefetch(B, KEYS))
        await until(lambda: len(store.told) == 1)
        leads.now = 0
        moves.take(Prefetch(B, KEYS))
        store.open.set()
        await until(lambda: moves.counts["left"] == 2)
        assert store.terms == [3]
        assert len(store.told) == 1
