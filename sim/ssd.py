"""The SSD tier of one node as two queues, one of reads and one of writes, each with a rate: which blocks move is the pool's
business, as in production (``kvstore.ladder``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from moonpool.core.events import EventBatch
from moonpool.core.use import Use
from moonpool.kvstore.event_log import sealed_in_dram
from moonpool.kvstore.ladder_claims import Demotion
from moonpool.kvstore.pool import Pool
from moonpool.sim.clock import Clock
from moonpool.sim.cluster import Ssd

BATCH = 32  # blocks written at once


class SsdTier:
    def __init__(self, pool: Pool, ssd: Ssd, blocks: int, block_bytes: int, clock: Clock, changed: Callable[[], None]) -> None:
        """``changed``: the pool may have events."""
        self._pool = pool
        self._ssd = ssd
        self._block_bytes = block_bytes
        self._clock = clock
        self._changed = changed
        self._free = list(range(blocks - 1, -1, -1))  # extents
        self._sealed: deque[bytes] = deque()  # to be written through
        self._writing = False
        self._reads_until = 0.0  # when the reads asked for will be done
        self.stopped = False
        self.read_bytes = 0.0
        self.written_bytes = 0.0

    # Up.

    def read(self, keys: Sequence[bytes], use: Use, done: Callable[[int], None]) -> int:
        """Bring up those of ``keys`` that only SSD has and nobody brings up yet; returns how many.

        ``done`` is called when they have come, with how many did.
        """
        promotions = self._pool.promote(keys, use, self._clock.now)
        self._changed()
        begin = max(self._clock.now, self._reads_until)
        size = len(promotions) * self._block_bytes
        self._reads_until = begin + size / self._ssd.read_bytes_per_s
        self.read_bytes += size

        def ended() -> None:
            if self.stopped:
                return
            good = sum(self._pool.promoted(one.id, True, self._clock.now) for one in promotions)
            self._changed()
            done(good)

        self._clock.at(self._reads_until, ended)
        return len(promotions)

    # Down.

    def heard(self, batch: EventBatch) -> None:
        if self._ssd.write == "through":
            self._sealed.extend(sealed_in_dram((batch,)))

    def pulse(self) -> None:
        """Something changed in the pool: what went is freed, and what should go down does."""
        self._free += self._pool.take_dropped_extents()
        if not self._writing and (batch := self._next()):
            self._write(batch)

    def _next(self) -> list[Demotion]:
        while self._sealed:
            keys = [self._sealed.popleft() for _ in range(min(BATCH, len(self._sealed)))]
            if batch := self._pool.tiers.sealed(keys):
                return batch
        slots = self._pool.slots
        spare = (slots.free_bytes + self._pool.clean_bytes) / max(slots.total_bytes, 1)
        return self._pool.demotions(BATCH, self._clock.now) if spare < self._ssd.demote_below else []

    def _write(self, batch: list[Demotion]) -> None:
        self._writing = True
        size = len(batch) * self._block_bytes
        self.written_bytes += size

        def ended() -> None:
            if self.stopped:
                return
            self._writing = False
            for demotion in batch:
                self._pool.demoted(demotion.id, self._extent(), self._clock.now)
            self._changed()

        self._clock.after(size / self._ssd.write_bytes_per_s, ended)

    def _extent(self) -> int | None:
        if not self._free:
            self._free += self._pool.evict_extents(BATCH, self._clock.now)
        return self._free.pop() if self._free else None
