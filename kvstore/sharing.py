"""One node's dealings with the shared tier: every block sealed here is written there, and what nobody on this host has is
looked for there.

The conductor does not know what lies there: a prefix is looked for when a reader asks for more of it than this host has.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.events import EventBatch
from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.claims import Life, Reserved
from moonpool.kvstore.event_log import sealed_in_dram
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.rows import Entry
from moonpool.kvstore.shared_tier.tier import SharedRead, SharedTier
from moonpool.kvstore.ssd.blocks import ReadEnd, Write

OURSELVES = 0  # the session number under which the node itself reserves
BATCH = 32  # blocks written or read in one go
BACKLOG = 1 << 14  # sealed blocks that may wait to be written; above it the oldest are not written
WRITE_S = 30.0
PLACE = "shared"
log = structlog.get_logger(__name__)


class _Coming(NamedTuple):
    """A reserved slot, and what shall lie in it."""

    id: int
    key: bytes
    slot: SlotRef


class Sharing:
    """Event-loop only. ``changed`` is called after every change of the pool."""

    def __init__(
        self,
        pool: Pool,
        tier: SharedTier,
        views: Sequence[NDArray[np.uint8]],
        me: Life,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._views = views
        self._me = me
        self._clock = clock
        self._changed = changed
        self._to_erase: list[tuple[KVLayout, bytes]] = []
        self._sealed: deque[bytes] = deque(maxlen=BACKLOG)
        self._wake = asyncio.Event()
        self._writer = asyncio.create_task(self._write_all(), name="write to the shared tier")

    # There.

    def heard(self, batches: Iterable[EventBatch]) -> None:
        """Blocks that were sealed in DRAM are to be written."""
        if keys := sealed_in_dram(batches):
            self._sealed.extend(keys)
            self._wake.set()

    def cleared(self, blocks: Iterable[tuple[KVLayout, bytes]]) -> None:
        """These are to be found by nobody any more."""
        self._to_erase.extend(blocks)
        if self._to_erase:
            self._wake.set()

    async def _erase(self) -> None:
        blocks, self._to_erase = self._to_erase, []
        for layout in {layout.fingerprint: layout for layout, _ in blocks}.values():
            await self._tier.erase(layout, [key for of, key in blocks if of.fingerprint == layout.fingerprint])

    async def _write_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._erase()
            while self._sealed and not self._to_erase:
                keys = [self._sealed.popleft() for _ in range(min(BATCH, len(self._sealed)))]
                await self._write(keys)
            if self._to_erase:
                self._wake.set()

    async def _write(self, keys: Sequence[bytes]) -> None:
        index = self._pool.held.index
        entries = [entry for key in keys if (entry := index.get(key)) is not None and entry.slot is not None]
        rows = [row for entry in entries if (row := index.row(entry.key)) is not None]
        self._pool.held.pin(rows)
        try:
            await self._tier.write([self._write_of(entry) for entry in entries], WRITE_S)
        finally:
            self._pool.held.unpin(rows)
            self._changed()

    def _write_of(self, entry: Entry) -> Write:
        slot = self._pool.held.ref(entry)
        return Write(entry.key, entry.parent, entry.layout, entry.use, self._view(slot, entry.layout))

    # And back.

    async def bring(self, layout: KVLayout, keys: Sequence[bytes], use: Use, deadline_s: float) -> None:
        """What comes after the leading ``keys`` that are here, as far as the tier has it and time and room allow."""
        until = self._clock() + deadline_s
        have = self._pool.lookup(keys)
        there = have + await self._tier.exists(layout, keys[have:], deadline_s)
        for at in range(have, there, BATCH):
            left = until - self._clock()
            if left <= 0 or not await self._bring(layout, keys[: min(at + BATCH, there)], at, use, left):
                return

    async def _bring(self, layout: KVLayout, keys: Sequence[bytes], first: int, use: Use, deadline_s: float) -> bool:
        """Whether ``keys[first:]`` are all in DRAM now."""
        parent = keys[first - 1] if first else None
        given = self._pool.reserve(OURSELVES, self._me, layout, keys[first:], parent, use, self._clock())
        self._changed()
        coming = [_Coming(one.id, one.key, one.slot) for one in given if one.state is Reserved.NEW and one.slot is not None]
        ends = [ReadEnd.LATE] * len(coming)
        try:
            reads = [SharedRead(one.key, layout, self._view(one.slot, layout)) for one in coming]
            ends = await self._tier.read(reads, deadline_s)
        finally:
            good = next((i for i, end in enumerate(ends) if end is not ReadEnd.OK), len(ends))
            self._pool.seal(OURSELVES, [one.id for one in coming[:good]], self._clock())
            self._pool.abandon(OURSELVES, [one.id for one in coming[good:]], self._clock())
            for _ in range(ends.count(ReadEnd.TORN)):
                self._pool.held.mismatch(PLACE)
            self._changed()
        return self._pool.lookup(keys) == len(keys)

    def _view(self, slot: SlotRef, layout: KVLayout) -> NDArray[np.uint8]:
        return slices.slot_of(layout, self._views[slot.region], slot.offset)

    def numbers(self) -> dict[str, float]:
        return self._tier.numbers() | {"shared_write_backlog": len(self._sealed)}

    def words(self) -> dict[str, str]:
        return self._tier.words()

    async def close(self) -> None:
        """What waits to be written is not written."""
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._tier.close()
