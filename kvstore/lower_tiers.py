"""What lies below a node's DRAM: an SSD of its own, a tier shared with other nodes, both or neither."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import StoreConfig
from moonpool.core.events import EventBatch
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life
from moonpool.kvstore.ladder import Ladder
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.sealing.keys import KvKeys
from moonpool.kvstore.shared_tier.tier import SharedTier
from moonpool.kvstore.sharing import Sharing
from moonpool.kvstore.ssd.tier import SsdTier


class LowerTiers:
    """Made by ``open``, then told of the pool by ``start``. Event-loop only."""

    def __init__(self, config: StoreConfig, ssd: SsdTier | None, shared: SharedTier | None) -> None:
        self._config = config
        self._ssd = ssd
        self._shared = shared
        self._pool: Pool | None = None
        self._clock: Callable[[], float] = lambda: 0.0
        self.ladder: Ladder | None = None
        self.sharing: Sharing | None = None

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        node: NodeId,
        layouts: Sequence[KVLayout],
        keys: KvKeys | None = None,
        *,
        zeroise: bool = False,
    ) -> LowerTiers:
        """Opens what is configured, encrypted where there are ``keys``; ``zeroise``: erased blocks leave zeros on SSD.

        ConfigError: a folder that is in use, or unusable, or too small.
        """
        ssd = await SsdTier.open(config, node, layouts, keys=keys, zeroise=zeroise) if config.ssd_path else None
        try:
            shared = await SharedTier.open(config, node, keys=keys) if config.shared_path else None
        except BaseException:
            if ssd is not None:
                await ssd.close()
            raise
        return cls(config, ssd, shared)

    @property
    def has_ssd(self) -> bool:
        return self._ssd is not None

    def lines(self) -> list[str]:
        """What was found at start, for the screen."""
        return [] if self._ssd is None else [self._ssd.line]

    def start(
        self,
        pool: Pool,
        views: Sequence[NDArray[np.uint8]],
        me: Life,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """The pool takes over what an earlier life left on SSD; blocks begin to go down."""
        self._pool, self._clock = pool, clock
        if self._ssd is not None:
            self.ladder = Ladder(pool, self._ssd, views, self._config, clock, changed)
            self.ladder.start()
            for layout in pool.held.layouts.values():
                self.ladder.register(layout)
        if self._shared is not None:
            self.sharing = Sharing(pool, self._shared, views, me, clock, changed)

    def register(self, layout: KVLayout) -> None:
        if self.ladder is not None:
            self.ladder.register(layout)

    def heard(self, batches: Iterable[EventBatch]) -> None:
        """Events of the pool, in order, each once."""
        if self.ladder is not None:
            self.ladder.heard(batches)
        if self.sharing is not None:
            self.sharing.heard(batches)

    def pulse(self) -> None:
        """Something changed in the pool."""
        if self.ladder is not None:
            self.ladder.pulse()
        cleared = [] if self._pool is None else self._pool.take_cleared()
        if self.sharing is not None and cleared:
            self.sharing.cleared(cleared)

    async def bring(self, layout: KVLayout, keys: Sequence[bytes], use: Use, deadline_s: float) -> None:
        """The leading ``keys`` come into DRAM, from SSD as far as it has them and then from the shared tier."""
        until = self._clock() + deadline_s
        if self.ladder is not None:
            await self.ladder.bring(layout, keys, use, deadline_s)
        left = until - self._clock()
        if self.sharing is not None and left > 0:
            await self.sharing.bring(layout, keys, use, left)

    async def flush(self, limit_s: float) -> int:
        """Before an orderly end: what only DRAM has goes to this node's SSD, for its next start. How many blocks did."""
        return 0 if self.ladder is None else await self.ladder.flush(limit_s)

    def numbers(self) -> dict[str, float]:
        return {name: value for part in self._parts() for name, value in part.numbers().items()}

    def words(self) -> dict[str, str]:
        return {name: value for part in self._parts() for name, value in part.words().items()}

    def _parts(self) -> list[Ladder | Sharing]:
        return [part for part in (self.ladder, self.sharing) if part is not None]

    async def close(self) -> None:
        """Waits for the bytes under way. What is on SSD stays for the next start."""
        if self.ladder is not None:
            await self.ladder.close()
        elif self._ssd is not None:
            await self._ssd.close()
        if self.sharing is not None:
            await self.sharing.close()
        elif self._shared is not None:
            await self._shared.close()
