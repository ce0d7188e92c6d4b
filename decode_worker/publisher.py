"""Completed blocks on their way from device pages into the pool of this host: what a resumed attempt fetches.

Blocks of the answer go out as they complete, prompt blocks come with the hand-off. Where the pool turns out to lack a part
of a running sequence (evicted, refused for want of room, or the store node was started anew), the sequence's pages fill it
in again, behind whatever completes meanwhile. Nothing here is waited for by a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import MoonpoolError
from moonpool.core.use import Use
from moonpool.decode_worker.sequence import CompletedBlock, Phase
from moonpool.decode_worker.sequence import Sequence as Running
from moonpool.engine.engine import Engine

BATCH = 16  # blocks of one publish call
MAX_QUEUED = 1_024  # blocks; above it the oldest are left out, and filled in again where their sequence still runs
SCARCE = 0.05  # share of free device pages below which no more than a batch may wait: steps come first
log = logging.getLogger(__name__)


class BlockStore(Protocol):
    async def publish(
        self, blocks: Sequence[tuple[bytes, NDArray[np.uint8]]], parent: bytes | None = None, use: Use = Use()
    ) -> int: ...

    async def lookup(self, keys: Sequence[bytes]) -> int: ...


class BlockPublisher:
    """One task. Owns one hold on the page of every block offered, until the block is stored, known there, or given up."""

    def __init__(self, engine: Engine, store: Callable[[], BlockStore | None], on_release: Callable[[], None]) -> None:
        """``on_release`` is told after pages were let go: somebody may be waiting for them."""
        self._engine = engine
        self._store = store
        self._on_release = on_release
        self._queue: deque[CompletedBlock] = deque()
        self._gaps: deque[Running] = deque()  # running sequences of which the pool may lack a part
        self._wake = asyncio.Event()
        self._under_way = 0
        self.stored = 0
        self.mended = 0  # of those, filled in again
        self.given_up = 0
        self.most_behind = 0  # blocks that waited at once
        self._task = asyncio.create_task(self._run(), name="block publisher")

    def __len__(self) -> int:
        """Pages held: how many completed blocks the pool is behind."""
        return len(self._queue) + self._under_way

    def offer(self, blocks: Sequence[CompletedBlock], *, stored: bool = False) -> None:
        """Take over the holds of ``blocks``; ``stored``: a hand-off brought them through this host's pool."""
        if self._store() is None or not blocks:
            self._release(blocks)
            return
        if stored:
            self._check(blocks[-1])  # of what lay in device pages before, the pool may have lost a part
            self._release(blocks)
            return
        self._queue.extend(blocks)
        pages = self._engine.pages
        limit = BATCH if pages.free + pages.cached < SCARCE * pages.total else MAX_QUEUED
        surplus = [self._queue.popleft() for _ in range(len(self._queue) - limit)]
        self.given_up += len(surplus)
        self._release(surplus)
        self.most_behind = max(self.most_behind, len(self))
        self._wake.set()

    def _check(self, block: CompletedBlock) -> None:
        if block.of is not None and block.of not in self._gaps:
            self._gaps.append(block.of)
            self._wake.set()

    async def close(self) -> None:
        """A publish under way is waited for: the store copies from the pages."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._release(self._queue)
        self._queue.clear()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue or self._gaps:
                if self._queue:
                    batch = self._next_run()
                    await self._holding(len(batch), self._publish(batch), batch)
                else:
                    await self._fill_in(self._gaps.popleft())

    async def _holding(self, pages: int, work: Coroutine[Any, Any, None], batch: Sequence[CompletedBlock]) -> None:
        """The store copies from the pages of ``batch`` until ``work`` is over; then they are let go."""
        self._under_way = pages
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise
        finally:
            self._under_way = 0
            self._release(batch)

    def _next_run(self) -> list[CompletedBlock]:
        """Blocks that follow one another in one sequence."""
        run = [self._queue.popleft()]
        while self._queue and len(run) < BATCH and self._queue[0].parent == run[-1].key:
            run.append(self._queue.popleft())
        return run

    async def _publish(self, batch: Sequence[CompletedBlock]) -> None:
        if await self._store_run(batch) < len(batch):
            self._check(batch[-1])

    async def _store_run(self, batch: Sequence[CompletedBlock]) -> int:
        """How many of ``batch`` are newly stored."""
        store = self._store()
        if store is None:
            self.given_up += len(batch)
            return 0
        try:
            view, held = self._engine.view, [block.page for block in batch]
            if view.behind(held):
                await asyncio.to_thread(view.gone_out, held)
            pages = [(block.key, view.bytes[block.page].reshape(-1)) for block in batch]
            stored = await store.publish(pages, batch[0].parent, batch[0].use)
        except Exception as e:
            self.given_up += len(batch)
            log.warning("%d blocks not published: %s", len(batch), e, exc_info=not isinstance(e, MoonpoolError))
            return 0
        self.stored += stored
        return stored

    async def _fill_in(self, sequence: Running) -> None:
        """The next blocks of ``sequence`` that the pool lacks; what it does not take now is tried when one more completes."""
        store = self._store()
        if store is None or sequence.phase is not Phase.RUNNING:
            return
        try:
            held = await store.lookup(sequence.keys[: sequence.published])
        except MoonpoolError as e:
            log.info("what the pool holds of %s attempt %d is not known: %s", *sequence.name, e)
            return
        if held >= sequence.published or sequence.phase is not Phase.RUNNING:
            return
        batch = [sequence.block(i) for i in range(held, min(held + BATCH, sequence.published))]
        self._engine.pages.retain([block.page for block in batch])
        await self._holding(len(batch), self._mend(sequence, batch), batch)

    async def _mend(self, sequence: Running, batch: Sequence[CompletedBlock]) -> None:
        stored = await self._store_run(batch)
        self.mended += stored
        if stored:
            self._gaps.append(sequence)

    def _release(self, blocks: Sequence[CompletedBlock] | deque[CompletedBlock]) -> None:
        if blocks:
            self._engine.pages.release([block.page for block in blocks])
            self._on_release()
