"""The conductor and real store nodes: what is stored, evicted and lost is what placements go by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member, store_node, worker

from moonpool.cluster.conductor import ConductorService
from moonpool.cluster.leadership import Leads
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, Member, Peers
from moonpool.core.placement import Placement, PlaceRequest, Segment, Source
from moonpool.kvstore.node import StoreNode

KEYS = block_keys("k", 8)


class Watched(ConductorService):
    """Tells what it hears of store nodes."""

    def __init__(self, *given: object, leads: Leads | None = None) -> None:
        self.heard: asyncio.Queue[EventBatch | IndexSnapshot] = asyncio.Queue()
        super().__init__(*given, leads=leads)  # type: ignore[arg-type]

    def _heard(self, event: EventBatch | IndexSnapshot) -> bool:
        again = super()._heard(event)
        self.heard.put_nowait(event)
        return again

    async def until(self, *expected: Segment) -> None:
        async with asyncio.timeout(10):
            while self.segments() != expected:
                await self.heard.get()

    def segments(self) -> tuple[Segment, ...]:
        request = PlaceRequest("r", 1, tuple(KEYS), len(KEYS) * LAYOUT.block_tokens, 4)
        answer = self.conductor.place(request, 0.0)
        assert isinstance(answer, Placement), answer
        return tuple(replace(segment, move=False) for segment in answer.segments)


def folder(parent: Path, node: str) -> Path:
    path = parent / node
    path.mkdir()
    return path


@asynccontextmanager
async def conductor(parent: Path, peers: Roll) -> AsyncIterator[Watched]:
    me: Member = member("conductor-0", Role.CONDUCTOR, "a")
    roll: Peers = peers
    service = await Watched.start(config(parent), me, roll)
    assert isinstance(service, Watched)
    peers.say(member("prefill-0", Role.PREFILL, "a"))
    peers.say(member("decode-0", Role.DECODE, "b"))
    try:
        yield service
    finally:
        await service.close()


async def publish(node: StoreNode, keys: list[bytes]) -> None:
    async with worker(node, f"decode-{node.member.node}") as (client, _):
        await client.publish([(key, block_bytes(key)) for key in keys])


@pytest.mark.parametrize("late", [False, True], ids=["watching before", "starting after"])
async def test_what_two_nodes_stored_is_fetched_from_where_it_lies(tmp_path: Path, late: bool) -> None:
    roll = Roll()
    async with (
        store_node(config(folder(tmp_path, "a")), roll, "a") as a,
        store_node(config(folder(tmp_path, "b")), roll, "b") as b,
    ):
        if late:
            await publish(a, KEYS[:3])
            await publish(b, KEYS[:6])
        async with conductor(tmp_path, roll) as service:
            if not late:
                await publish(a, KEYS[:3])
                await publish(b, KEYS[:6])
            await service.until(
                Segment(0, 3, Source.FETCH, a.member.node),
                Segment(3, 3, Source.FETCH, b.member.node),
                Segment(6, 2, Source.RECOMPUTE),
            )


async def test_evicted_blocks_are_no_longer_fetched(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(folder(tmp_path, "a"), slots=16), roll, "a") as a, conductor(tmp_path, roll) as service:
        roll.say(member("store-b", Role.STORE, "b", address="127.0.0.1:1"))
        await publish(a, KEYS)
        await service.until(Segment(0, 8, Source.FETCH, a.member.node))
        await publish(a, block_keys("other", 12))
        async with worker(a) as (client, _):
            left = await client.lookup(KEYS)
        assert 0 < left < 8
        await service.until(Segment(0, left, Source.FETCH, a.member.node), Segment(left, 8 - left, Source.RECOMPUTE))


async def test_a_node_that_comes_back_empty_is_known_to_be_empty(tmp_path: Path) -> None:
    roll = Roll()
    async with conductor(tmp_path, roll) as service:
        roll.say(member("store-b", Role.STORE, "b", address="127.0.0.1:1"))
        async with store_node(config(folder(tmp_path, "a")), roll, "a") as a:
            await publish(a, KEYS)
            await service.until(Segment(0, 8, Source.FETCH, a.member.node))
            roll.say(a.member, Liveness.GONE)
        assert service.segments() == (Segment(0, 8, Source.RECOMPUTE),)
