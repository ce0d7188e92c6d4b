"""Least frequently used since it came here goes first; among equals the least recently used."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.use import Use
from moonpool.kvstore.eviction.ranking import Ranking

USE = 1 << 48  # a rank is uses * USE + number of the last call


class Lfu:
    name = "lfu"
    wants_keys = False

    def __init__(self) -> None:
        self._calls = 0
        self._ranking = Ranking()
        self.offer = self._ranking.offer
        self.withhold = self._ranking.withhold
        self.removed = self._ranking.withhold

    def named(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        pass

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        pass

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

    def choose(self, n: int, now: float) -> list[int]:
        return self._ranking.take(n)
