"""Least frequently used since it came here goes first; among equals the least recently used."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.use import Use
from moonpool.kvstore.eviction.ranking import Ranked

USE = 1 << 48  # a rank is uses * USE + number of the last call


class Lfu(Ranked):
    name = "lfu"

    def stored(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        self._calls += 1
        self._ranking.grow(max(rows, default=-1) + 1)
        for row in rows:
            self._ranking.rank[row] = USE + self._calls

    def used(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        self._calls += 1
        rank = self._ranking.rank
        for row in rows:
            rank[row] = (rank[row] // USE + 1) * USE + self._calls
