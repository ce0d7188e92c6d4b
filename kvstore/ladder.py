"""DRAM and SSD of one node as a ladder: cold blocks go down before their room is needed, wanted ones come up.

The pool decides which blocks, the tier moves the bytes; this drives both. Demotion runs while too little of DRAM could be
had without losing a block (from ``demote_below`` up to ``demote_until``), or for every sealed block (write-through). Who asks
for room never waits for it: what is not on SSD by then is evicted as if there were no tier.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import StoreConfig
from moonpool.core.events import EventBatch, Tier
from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.event_log import sealed_in_dram
from moonpool.kvstore.eviction.sketch import FrequencySketch
from moonpool.kvstore.ladder_claims import Demotion
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Recovered, Write
from moonpool.kvstore.ssd.tier import SsdTier

BATCH_BYTES = 32 << 20  # moved in one go: bounds what is pinned meanwhile, and lets leading blocks be used early
BATCH = 64  # blocks, where they are small
SKETCHED = 1 << 16  # blocks whose heat is told apart
BACKLOG = 1 << 16  # sealed blocks that may wait to be written through; the oldest go down under pressure only
STAY_S = 0.5  # that a block which is not hot stays in DRAM at least
LAST_S = 0.05  # for the word of what came at the last moment
RETRY_S = 1.0  # after a batch of which nothing could be written
log = structlog.get_logger(__name__)


class Ladder:
    """Event-loop only. ``changed`` is called after every change of the pool; it calls ``pulse`` in turn."""

    def __init__(
        self,
        pool: Pool,
        tier: SsdTier,
        views: Sequence[NDArray[np.uint8]],
        config: StoreConfig,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._views = views
        self._config = config
        self._clock = clock
        self._changed = changed
        self._wake = asyncio.Event()
        self._coming: dict[bytes, asyncio.Task[None]] = {}  # keys on their way up: several readers share one read
        self._climbs: set[asyncio.Task[None]] = set()
        self._demoter: asyncio.Task[None] | None = None
        self._through = config.ssd_write == "through"
        self._heat = FrequencySketch(SKETCHED)
        self._passing: dict[bytes, None] = {}  # came up while they were not hot: the first to leave DRAM again
        self._sealed: deque[bytes] = deque(maxlen=BACKLOG)  # to be written through
        self._erasing: asyncio.Task[None] | None = None
        tier.on_lost = self._lost
        tier.on_moved = self._moved

    def start(self) -> None:
        """Take over what an earlier life left on disk, and begin to demote."""
        self._adopt(self._tier.recovered)
        self._demoter = asyncio.create_task(self._demote(), name="demote")

    def register(self, layout: KVLayout) -> None:
        """The pool knows ``layout`` now: its blocks on disk can be found from here on. ConfigError: segments too small."""
        self._adopt(self._tier.register(layout))

    def _adopt(self, found: Sequence[Recovered]) -> None:
        if found:
            self._tier.free(self._pool.recovered(found, self._clock()))
            self._changed()

    # Up.

    async def bring(self, layout: KVLayout, keys: Sequence[bytes], use: Use, deadline_s: float) -> None:
        """Blocks of ``keys`` that lie on SSD come into DRAM, leading ones first, as far as time and room allow."""
        until = self._clock() + deadline_s
        wanted = [key for key, _ in self._pool.on_ssd(keys)]
        self._heat.add(wanted)
        mine = [key for key in wanted if key not in self._coming]
        tasks = {self._coming[key] for key in wanted if key in self._coming}
        if mine:
            task = asyncio.create_task(self._climb(layout, mine, use, until), name="promote")
            self._climbs.add(task)
            task.add_done_callback(self._climbs.discard)
            self._coming.update(dict.fromkeys(mine, task))
            task.add_done_callback(lambda _: [self._coming.pop(key, None) for key in mine])
            tasks.add(task)
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s + LAST_S)

    async def _climb(self, layout: KVLayout, keys: Sequence[bytes], use: Use, until: float) -> None:
        try:
            for batch in _batches(keys, layout.slot_bytes):
                left = until - self._clock()
                if left <= 0 or not await self._promote(batch, use, left):
                    return
        finally:
            # Not before whoever asked for them has pinned them.
            asyncio.get_running_loop().call_later(STAY_S, self._passing.update, dict.fromkeys(keys))

    def _is_hot(self, key: bytes) -> bool:
        return self._heat.estimate(key) >= self._config.promote_after

    async def _promote(self, keys: Sequence[bytes], use: Use, deadline_s: float) -> bool:
        """Whether all of it came: what follows a missing block is of no use to whoever asked."""
        promotions = self._pool.promote(keys, use, self._clock())
        if not promotions:
            return False
        reads = [Read(p.extent, p.key, p.layout, self._view(p.slot, p.layout)) for p in promotions]
        ends = [ReadEnd.GONE] * len(reads)
        try:
            ends = await self._tier.read(reads, deadline_s)
        finally:
            now = self._clock()
            for promotion, end in zip(promotions, ends, strict=True):
                self._pool.promoted(promotion.id, end is ReadEnd.OK, now)
                if end is ReadEnd.TORN:
                    self._pool.held.mismatch("ssd")
            self._changed()
        return len(promotions) == len(keys) and all(end is ReadEnd.OK for end in ends)

    # Down.

    def heard(self, batches: Iterable[EventBatch]) -> None:
        """What was sealed in DRAM is to be written through, where the tier is configured so."""
        if self._through and (keys := sealed_in_dram(batches)):
            self._sealed.extend(keys)
            self._wake.set()

    def pulse(self) -> None:
        """Something changed in the pool."""
        if self._erasing is None and (dropped := self._pool.take_dropped_extents()):
            self._erasing = asyncio.create_task(self._erase(dropped), name="erase")
        slots = self._pool.slots
        if self._passing and slots.free_bytes < self._config.demote_until * slots.total_bytes:
            cold = [key for key in self._passing if not self._is_hot(key)]
            self._passing = dict.fromkeys(self._pool.let_go(cold))
        if not self._wake.is_set() and self._spare_share < self._config.demote_below:
            self._wake.set()

    @property
    def _spare_share(self) -> float:
        """Of DRAM: what can be had without losing a block."""
        slots = self._pool.slots
        return (slots.free_bytes + self._pool.clean_bytes) / max(slots.total_bytes, 1)

    async def _demote(self) -> None:
        while True:
            await self._wake.wait()
            while batch := self._next_batch():
                if not await self._write(batch):
                    await asyncio.sleep(RETRY_S)
            self._wake.clear()

    async def flush(self, limit_s: float) -> int:
        """Write what only DRAM has, for the next start, as far as time and the tier's free room go. How many there were."""
        until, written = self._clock() + limit_s, 0
        keys = self._pool.held.index.keys_in(Tier.G2)
        for at in range(0, len(keys), BATCH):
            batch = self._pool.tiers.sealed(keys[at : at + BATCH])
            full = any(n > self._tier.room(layout) for layout, n in Counter(one.layout for one in batch).items())
            if full or self._clock() >= until:
                for demotion in batch:
                    self._pool.demoted(demotion.id, None, self._clock())
                break
            await self._write(batch)
            written += len(batch)
        return written

    def _next_batch(self) -> list[Demotion]:
        if self._sealed:
            keys = [self._sealed.popleft() for _ in range(min(BATCH, len(self._sealed)))]
            if batch := self._pool.tiers.sealed(keys):
                return batch
        if self._spare_share >= self._config.demote_until:
            return []
        return self._pool.demotions(BATCH, self._clock())

    async def _erase(self, extents: list[int]) -> None:
        """Of blocks that were withdrawn: no restart may find them again."""
        while extents:
            await self._tier.erase(extents)
            extents = self._pool.take_dropped_extents()
        self._erasing = None

    async def _write(self, batch: Sequence[Demotion]) -> bool:
        """Whether any of it is on SSD now."""
        extents: list[int | None] = [None] * len(batch)
        try:
            for layout, blocks in Counter(one.layout for one in batch).items():
                self._make_room(layout, blocks)
            writes = [Write(d.key, d.parent, d.layout, d.use, self._view(d.slot, d.layout)) for d in batch]
            extents = await self._tier.write(writes)
        finally:
            for demotion, extent in zip(batch, extents, strict=True):
                self._pool.demoted(demotion.id, extent, self._clock())
            self._changed()
        return any(extent is not None for extent in extents)

    def _make_room(self, layout: KVLayout, blocks: int) -> None:
        """The tier is full: its coldest leaves go, of whatever layout (compaction turns their room into room for this one)."""
        short = blocks - self._tier.room(layout)
        if short > 0:
            self._tier.free(self._pool.evict_extents(short, self._clock()))

    def _view(self, slot: SlotRef, layout: KVLayout) -> NDArray[np.uint8]:
        return slices.slot_of(layout, self._views[slot.region], slot.offset)

    # What the tier tells.

    def _lost(self, extents: Sequence[int]) -> None:
        self._pool.extents_lost(extents, self._clock())
        self._changed()

    def _moved(self, moved: Mapping[int, int]) -> None:
        self._pool.extents_moved(moved)

    @property
    def idle(self) -> bool:
        """Nothing is on its way up or being erased."""
        return not self._climbs and self._erasing is None

    def numbers(self) -> dict[str, float]:
        return self._tier.numbers() | {"ssd_write_backlog": len(self._sealed)}

    def words(self) -> dict[str, str]:
        return self._tier.words()

    async def close(self) -> None:
        """Waits for the bytes under way; what is on SSD stays for the next start."""
        tasks = [task for task in (*self._climbs, self._demoter, self._erasing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tier.close()


def _batches(keys: Sequence[bytes], slot_bytes: int) -> Iterator[Sequence[bytes]]:
    size = max(1, BATCH_BYTES // slot_bytes)
    for i in range(0, len(keys), size):
        yield keys[i : i + size]
