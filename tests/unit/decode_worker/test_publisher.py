"""What a decode worker leaves in the pool, and what it holds on to meanwhile, with a store that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.core.blocks import BlockHasher
from moonpool.core.errors import PeerSilent
from moonpool.core.ids import RequestId
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.core.use import Use
from moonpool.decode_worker.publisher import BATCH, BlockPublisher
from moonpool.decode_worker.sequence import Phase
from moonpool.decode_worker.sequence import Sequence as Running
from moonpool.engine.pages import PagePool

SIZE, PAGES = 4, 100
HASHER = BlockHasher(bytes(32), bytes(16), SIZE)


@dataclass
class Store:
    """Takes blocks whose parents it has, as far as it has room. Cleared ``gate``: it does not answer."""

    room: int = 1_000
    broken: bool = False
    held: set[bytes] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0

    async def publish(self, blocks: Sequence[tuple[bytes, Any]], parent: bytes | None = None, use: Use = Use()) -> int:
        self.calls += 1
        await self.gate.wait()
        if self.broken:
            raise PeerSilent("gone")
        stored = 0
        for key, _ in blocks:
            if (parent is None or parent in self.held) and key not in self.held and len(self.held) < self.room:
                self.held.add(key)
                stored += 1
            parent = key
        return stored

    async def lookup(self, keys: Sequence[bytes]) -> int:
        await self.gate.wait()
        return next((i for i, key in enumerate(keys) if key not in self.held), len(keys))


@dataclass
class Scene:
    pages: PagePool
    store: Store
    publisher: BlockPublisher

    def sequence(self, blocks: int) -> Running:
        """Running, with so many whole blocks computed."""
        request = Request(RequestId("r"), tuple(range(blocks * SIZE)), SamplingParams(max_tokens=9), bytes(16), ())
        sequence = Running(Attempt(request, 1), HASHER, 1_000, remote=False)
        sequence.pages, sequence.phase = self.pages.allocate(blocks), Phase.RUNNING
        sequence.computed, sequence.published = blocks * SIZE, blocks
        return sequence

    def offer(self, sequence: Running, first: int, end: int) -> None:
        blocks = [sequence.block(i) for i in range(first, end)]
        self.pages.retain([block.page for block in blocks])
        self.publisher.offer(blocks)

    async def quiet(self) -> None:
        async with asyncio.timeout(5):
            while len(self.publisher) or self.publisher._gaps:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with _scene() as made:
        yield made


@asynccontextmanager
async def _scene() -> AsyncIterator[Scene]:
    pages, store = PagePool(PAGES), Store()
    view = SimpleNamespace(bytes=np.zeros((PAGES, 1, 8), np.uint8), behind=lambda pages: False)
    engine: Any = SimpleNamespace(pages=pages, view=view)
    publisher = BlockPublisher(engine, lambda: store, lambda: None)
    yield Scene(pages, store, publisher)
    store.gate.set()
    await publisher.close()


async def test_a_store_that_does_not_answer_leaves_no_more_than_a_batch_waiting_where_pages_are_scarce(scene: Scene) -> None:
    first = scene.sequence(60)
    scene.offer(first, 0, 60)
    assert len(scene.publisher) == 60
    second = scene.sequence(38)
    scene.offer(second, 0, 38)
    await asyncio.sleep(0)
    assert len(scene.publisher) <= 2 * BATCH
    assert scene.publisher.given_up >= 98 - 2 * BATCH
    scene.store.gate.set()
    await scene.quiet()
    assert {*first.keys, *second.keys} >= scene.store.held >= set(second.keys), "what was left out is filled in again"
    scene.pages.release([*first.pages, *second.pages])
    assert scene.pages.used == 0


async def test_what_the_store_lost_comes_again_from_the_first_block_on(scene: Scene) -> None:
    scene.store.gate.set()
    sequence = scene.sequence(50)
    scene.offer(sequence, 0, 49)
    await scene.quiet()
    assert scene.store.held == set(sequence.keys[:49])
    scene.store.held.clear()
    scene.offer(sequence, 49, 50)
    await scene.quiet()
    assert scene.store.held == set(sequence.keys)
    assert scene.publisher.mended == 50


async def test_a_full_store_is_asked_again_when_the_next_block_completes_and_not_before(scene: Scene) -> None:
    scene.store.gate.set()
    scene.store.room = 10
    sequence = scene.sequence(30)
    scene.offer(sequence, 0, 29)
    await scene.quiet()
    calls = scene.store.calls
    await asyncio.sleep(0.01)
    assert scene.store.calls == calls
    assert len(scene.store.held) == 10
    scene.store.room = 100
    scene.offer(sequence, 29, 30)
    await scene.quiet()
    assert scene.store.held == set(sequence.keys)


async def test_a_sequence_that_ended_is_not_filled_in(scene: Scene) -> None:
    scene.store.gate.set()
    sequence = scene.sequence(20)
    scene.offer(sequence, 10, 20)
    sequence.phase = Phase.OVER
    pages, sequence.pages = sequence.pages, []
    scene.pages.release(pages)
    await scene.quiet()
    assert not scene.store.held
    assert scene.pages.used == 0


async def test_a_broken_session_costs_the_blocks_and_nothing_else(scene: Scene) -> None:
    scene.store.gate.set()
    scene.store.broken = True
    sequence = scene.sequence(5)
    scene.offer(sequence, 0, 5)
    await scene.quiet()
    assert (scene.publisher.stored, len(scene.store.held)) == (0, 0)
    assert scene.publisher.given_up >= 5
    scene.pages.release(sequence.pages)
    assert scene.pages.used == 0
