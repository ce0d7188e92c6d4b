"""In which tier the blocks lay that a reader of this host asked for: counted, in tokens, once they are pinned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.core.layout import KVLayout
from moonpool.kvstore.pool import Pool


@dataclass(frozen=True, slots=True)
class PrefixTiers:
    """As things stood before anything was brought up: ``here`` leading blocks in any tier of this node, ``ssd`` of them by
    position in its SSD tier only."""

    here: int
    ssd: tuple[int, ...]

    @classmethod
    def before(cls, pool: Pool, keys: Sequence[bytes]) -> PrefixTiers:
        below = {key for key, _ in pool.on_ssd(keys)} if pool.held.index.on_ssd else set()
        return cls(pool.lookup(keys), tuple(i for i, key in enumerate(keys) if key in below))

    def count(self, pool: Pool, pinned: int, layout: KVLayout) -> None:
        """``pinned`` leading blocks are the reader's now; what was not here before came from the shared tier."""
        shared = max(pinned - self.here, 0)
        ssd = sum(i < pinned for i in self.ssd)
        for tier, blocks in (("dram", pinned - shared - ssd), ("ssd", ssd), ("shared", shared)):
            pool.held.counted[f"prefix_tokens_{tier}_count"] += blocks * layout.block_tokens
