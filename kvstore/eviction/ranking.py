"""Candidates by a rank that mostly grows: a heap that need not hear of every change.

The heap's items may be older than the ranks. One found too low at the top is put back with its row's rank; a rank that
fell (the row was given out anew) gets a second item, and the old one is recognised by ``_queued``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moonpool.core.use import Use

NEVER = -1
SPARE_ITEMS = 1024  # stale items allowed beyond twice the rows


class Ranking:
    """Rows with a rank each (a non-negative int); the candidate of the lowest rank goes first, then the lowest row."""

    def __init__(self) -> None:
        self.rank: list[int] = []  # by row; the owner writes it
        self._queued: list[int] = []  # by row: the rank of its item in the heap, NEVER without one
        self._candidate = bytearray()
        self._heap: list[tuple[int, int]] = []

    def grow(self, rows: int) -> None:
        """Make room for rows below ``rows``."""
        if rows > len(self.rank):
            more = max(rows, 2 * len(self.rank)) - len(self.rank)
            self.rank.extend([0] * more)
            self._queued.extend([NEVER] * more)
            self._candidate.extend(bytes(more))

    def offer(self, rows: Sequence[int]) -> None:
        rank, queued, candidate, heap = self.rank, self._queued, self._candidate, self._heap
        for row in rows:
            candidate[row] = 1
            if queued[row] == NEVER or queued[row] > rank[row]:
                queued[row] = rank[row]
                heapq.heappush(heap, (rank[row], row))
        if len(heap) > 2 * len(rank) + SPARE_ITEMS:
            heap[:] = [item for item in heap if item[0] == queued[item[1]]]
            heapq.heapify(heap)

    def withhold(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._candidate[row] = 0

    def lower(self, rows: Sequence[int], rank: int) -> None:
        """Rows take ``rank``, candidates or not."""
        for row in rows:
            self.rank[row] = rank
        self.offer([row for row in rows if self._candidate[row]])

    def peek(self) -> int | None:
        """The first candidate; it stays one. None without candidates."""
        heap, rank, queued = self._heap, self.rank, self._queued
        while heap:
            item, row = heap[0]
            if item != queued[row]:
                heapq.heappop(heap)
            elif not self._candidate[row]:
                heapq.heappop(heap)
                queued[row] = NEVER
            elif item != rank[row]:
                heapq.heapreplace(heap, (rank[row], row))
                queued[row] = rank[row]
            else:
                return row
        return None

    def take(self, n: int) -> list[int]:
        """At most ``n`` first candidates, which are none any more."""
        out: list[int] = []
        while len(out) < n and (row := self.peek()) is not None:
            heapq.heappop(self._heap)
            self._queued[row] = NEVER
            self._candidate[row] = 0
            out.append(row)
        return out


class Ranked:
    """What policies share that give every row one rank and need no keys and no lengths of answers."""

    wants_keys = False

    def __init__(self) -> None:
        self._calls = 0
        self._cooled = 0  # a rank: far below that of any use
        self._ranking = Ranking()
        self.offer = self._ranking.offer
        self.withhold = self._ranking.withhold
        self.removed = self._ranking.withhold

    def named(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        pass

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        pass

    def cool(self, rows: Sequence[int], now: float) -> None:
        """See ``policy.Cooler``."""
        self._cooled += 1
        self._ranking.lower(rows, self._cooled)

    def choose(self, n: int, now: float) -> list[int]:
        return self._ranking.take(n)
