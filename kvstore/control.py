"""What operators ask of the pool: where a block is, and what would go, or goes, when blocks are dropped or cleared.

Pure. Nothing that is in use goes: neither a pinned block, nor one that has such a block after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonpool.core.events import Tier
from moonpool.core.layout import RAW, KVLayout
from moonpool.kvstore.codecs.copies import LOSSY, all_keys, copy_key
from moonpool.kvstore.index import Entry
from moonpool.kvstore.pool import Pool


@dataclass(frozen=True, slots=True)
class BlockState:
    """``tiers`` is empty for a block that is not here; ``codec`` names that of a copy which stands for the full block."""

    tiers: tuple[Tier, ...] = ()
    layout: str = ""
    tenant: str = ""
    codec: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Blocks and bytes that went, or would go, and blocks that were meant, too, but stay."""

    cleared: int
    kept: int
    bytes: int


class Control:
    def __init__(self, pool: Pool) -> None:
        self._index = pool.held.index
        self._pool = pool

    def state(self, key: bytes) -> BlockState:
        """Of the full block, or of a lossy copy of it where that is all there is."""
        for name in (key, *(copy_key(key, codec) for codec in LOSSY)):
            entry = self._index.get(name)
            if entry is not None:
                layout = entry.layout
                codec = "" if layout.codec == RAW else layout.codec
                return BlockState((Tier.G2,), layout.fingerprint, entry.use.tenant, codec, layout.slot_bytes)
        return BlockState()

    def layouts(self) -> list[tuple[KVLayout, int]]:
        """What is registered, with how many blocks of it are here."""
        entries = (self._index.get(key) for key in self._index.keys())
        count = Counter(entry.layout.fingerprint for entry in entries if entry is not None)
        return [(layout, count[name]) for name, layout in self._pool.held.layouts.items()]

    def drop(self, keys: Iterable[bytes], dry_run: bool) -> Cleaned:
        """Drop exactly ``keys``. One that is in use, or that other blocks follow, stays."""
        meant = {key: entry for key in keys if (entry := self._index.get(key)) is not None}
        following = {key: len(entry.children) for key, entry in meant.items()}
        leaves = [entry for key, entry in meant.items() if not following[key]]
        gone: list[Entry] = []
        while leaves:
            entry = leaves.pop()
            if entry.pins:
                continue
            gone.append(entry)
            if entry.parent in following:
                following[entry.parent] -= 1
                if not following[entry.parent]:
                    leaves.append(meant[entry.parent])
        if not dry_run:
            for entry in gone:
                self._pool.held.withdraw(entry.key)
        return Cleaned(len(gone), len(meant) - len(gone), sum(entry.layout.slot_bytes for entry in gone))

    def clean(self, keys: Sequence[bytes], model: str, tenant: str, dry_run: bool) -> Cleaned:
        """Drop ``keys`` and their lossy copies with all that follows them; without keys all blocks of ``model`` (by its
        fingerprint, or that of one layout) and of ``tenant``, where these are named."""
        if keys:
            return self.drop(self._following([name for key in keys for name in all_keys(key)]), dry_run)
        return self.drop([key for key in list(self._index.keys()) if self._is_of(key, model, tenant)], dry_run)

    def _is_of(self, key: bytes, model: str, tenant: str) -> bool:
        entry = self._index.get(key)
        if entry is None or (tenant and entry.use.tenant != tenant):
            return False
        return not model or model in (entry.layout.model, entry.layout.fingerprint)

    def _following(self, keys: Iterable[bytes]) -> set[bytes]:
        """``keys`` and their descendants, as far as they are here."""
        found: set[bytes] = set()
        stack = list(keys)
        while stack:
            key = stack.pop()
            entry = self._index.get(key)
            if entry is not None and key not in found:
                found.add(key)
                stack.extend(entry.children)
        return found
