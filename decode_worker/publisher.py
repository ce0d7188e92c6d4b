"""Completed blocks on their way from device pages into the pool of this host."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import MoonpoolError
from moonpool.core.use import Use
from moonpool.decode_worker.sequence import CompletedBlock
from moonpool.engine.engine import Engine

BATCH = 16  # blocks of one publish call
MAX_QUEUED = 1_024  # blocks; above it the oldest are not published: they can be computed again
log = logging.getLogger(__name__)


class BlockStore(Protocol):
    async def publish(
        self, blocks: Sequence[tuple[bytes, NDArray[np.uint8]]], parent: bytes | None = None, use: Use = Use()
    ) -> int: ...


class BlockPublisher:
    """One task. Owns one hold on the page of every block offered, until the block is stored, known there, or given up."""

    def __init__(self, engine: Engine, store: Callable[[], BlockStore | None], on_release: Callable[[], None]) -> None:
        """``on_release`` is told after pages were let go: somebody may be waiting for them."""
        self._engine = engine
        self._store = store
        self._on_release = on_release
        self._queue: deque[CompletedBlock] = deque()
        self._wake = asyncio.Event()
        self._under_way = 0
        self.stored = 0
        self.given_up = 0
        self._task = asyncio.create_task(self._run(), name="block publisher")

    def __len__(self) -> int:
        """Pages held."""
        return len(self._queue) + self._under_way

    def offer(self, blocks: Sequence[CompletedBlock], *, stored: bool = False) -> None:
        """Take over the holds of ``blocks``; ``stored``: this host's pool has them already."""
        if stored or self._store() is None:
            self._release(blocks)
            return
        self._queue.extend(blocks)
        surplus = [self._queue.popleft() for _ in range(len(self._queue) - MAX_QUEUED)]
        self.given_up += len(surplus)
        self._release(surplus)
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
            while self._queue:
                batch = self._next_run()
                self._under_way = len(batch)
                publishing = asyncio.create_task(self._publish(batch))
                try:
                    await asyncio.wait({publishing})
                except asyncio.CancelledError:
                    await asyncio.wait({publishing})  # the store copies from the pages until then
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
        store = self._store()
        if store is None:
            self.given_up += len(batch)
            return
        try:
            pages = [(block.key, self._engine.kv_bytes[block.page].reshape(-1)) for block in batch]
            self.stored += await store.publish(pages, batch[0].parent, batch[0].use)
        except Exception as e:
            self.given_up += len(batch)
            log.warning("%d blocks not published: %s", len(batch), e, exc_info=not isinstance(e, MoonpoolError))

    def _release(self, blocks: Sequence[CompletedBlock] | deque[CompletedBlock]) -> None:
        if blocks:
            self._engine.pages.release([block.page for block in blocks])
            self._on_release()
