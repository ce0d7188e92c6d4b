"""Least frequently used goes first; among equals the block that lies later in its prompt (Mooncake technical report).

A later block saves a hit less often, since everything before it must match too; then the least recently used.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.use import Use
from moonpool.kvstore.eviction.ranking import Ranked

PLACE = 1 << 48  # a rank is uses * USE + (LAST - block number in the prompt) * PLACE + number of the last call
LAST = (1 << 24) - 1
USE = PLACE << 24


class LengthAware(Ranked):
    name = "length_aware"

    def stored(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        self._ranking.grow(max(rows, default=-1) + 1)
        self._rank(rows, first, [1] * len(rows))

    def used(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        rank = self._ranking.rank
        self._rank(rows, first, [rank[row] // USE + 1 for row in rows])

    def _rank(self, rows: Sequence[int], first: int, uses: Sequence[int]) -> None:
        self._calls += 1
        rank = self._ranking.rank
        for at, (row, count) in enumerate(zip(rows, uses, strict=True), first):
            rank[row] = count * USE + (LAST - min(at, LAST)) * PLACE + self._calls
