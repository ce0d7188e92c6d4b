"""What operators ask of the pool: where a block is, and what would go, or goes, when blocks are dropped or cleared.

Pure. Nothing that is in use goes: neither a pinned block, nor one that has such a block after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.core.events import Tier
from moonpool.kvstore.pool import Pool


@dataclass(frozen=True, slots=True)
class BlockState:
    """``tiers`` is empty for a block that is not here."""

    tiers: tuple[Tier, ...] = ()
    layout: str = ""
    tenant: str = ""
    held: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cleaned:
    cleared: int
    kept: int
    bytes: int


class Control:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def state(self, key: bytes) -> BlockState:
        entry = self._pool.held.index.get(key)
        return BlockState() if entry is None else BlockState((Tier.G2,), bytes=self._pool.slots.slot_bytes)

    def drop(self, keys: Sequence[bytes], dry_run: bool) -> Cleaned:
        """Drop exactly ``keys``, which follow one another, the last one first. One that has other blocks after it stays."""
        index = self._pool.held.index
        gone: set[bytes] = set()
        kept = 0
        for key in reversed(keys):
            entry = index.get(key)
            if entry is None:
                continue
            if entry.pins or entry.children - gone:
                kept += 1
            else:
                gone.add(key)
                if not dry_run:
                    self._pool.held.withdraw(key)
        return Cleaned(len(gone), kept, len(gone) * self._pool.slots.slot_bytes)

    def clean(self, keys: Sequence[bytes], model: str, tenant: str, dry_run: bool) -> Cleaned:
        """Drop ``keys`` (none: everything, of ``model`` and of ``tenant`` where named) with all that follows them."""
        index = self._pool.held.index
        doomed = list(index.keys())[::-1] if not keys else self._following(keys)[::-1]
        return self.drop(doomed[::-1], dry_run)

    def _following(self, keys: Sequence[bytes]) -> list[bytes]:
        """``keys`` and their descendants, parents first."""
        index = self._pool.held.index
        order = list(keys)
        for key in order:  # grows while it is read
            entry = index.get(key)
            order.extend(entry.children if entry else ())
        return list(dict.fromkeys(order))
