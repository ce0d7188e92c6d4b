"""Least recently used goes first.

A block's rank is the number of the call that used it last. The heap holds at most one item a row, and the item may be
older than the rank: ranks only grow, so an item found too old at the top is put back with its row's rank. Hence a use
costs one list write, and a parent that becomes a leaf late still takes its place by its last use.

Only cooling lowers a rank. It puts a second item into the heap, and what the first one leaves behind is passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from moonpool.core.use import Use

ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
QUEUED, CANDIDATE = 1, 2
COLD = -1 << 60  # ranks of cooled rows count up from here, and never get near those of used ones
SPARE_ITEMS = 1024  # second items allowed beyond the rows


class Lru:
    name = "lru"
    wants_keys = False

    def __init__(self) -> None:
        self._calls = 0
        self._cooled = 0
        self._rank: list[int] = []  # by row: number of the last call that used it, shifted left by ROW_BITS
        self._state = bytearray()  # by row: QUEUED has an item in the heap, CANDIDATE (always QUEUED, too) may be chosen
        self._heap: list[int] = []  # rank | row

    def named(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        pass

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        pass

    def stored(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        self._calls = calls = self._calls + 1
        calls <<= ROW_BITS
        rank = self._rank
        try:
            for row in rows:
                rank[row] = calls
        except IndexError:
            self._grow(max(rows) + 1)
            for row in rows:
                rank[row] = calls

    used = stored

    def cool(self, rows: Sequence[int], now: float) -> None:
        """See ``policy.Cooler``."""
        self._cooled += 1
        cold, rank, state, heap = COLD + (self._cooled << ROW_BITS), self._rank, self._state, self._heap
        for row in rows:
            rank[row] = cold
            if state[row] & QUEUED:
                heapq.heappush(heap, cold | row)
        if len(heap) > len(rank) + SPARE_ITEMS:
            heap[:] = [rank[row] | row for row in range(len(rank)) if state[row] & QUEUED]
            heapq.heapify(heap)

    def offer(self, rows: Sequence[int]) -> None:
        state, rank, heap, push = self._state, self._rank, self._heap, heapq.heappush
        for row in rows:
            if not state[row]:
                push(heap, rank[row] | row)
            state[row] = QUEUED | CANDIDATE

    def withhold(self, rows: Sequence[int]) -> None:
        state = self._state
        for row in rows:
            state[row] &= QUEUED

    def choose(self, n: int, now: float) -> list[int]:
        state, rank, heap, pop = self._state, self._rank, self._heap, heapq.heappop
        out: list[int] = []
        while n > 0 and heap:
            item = heap[0]
            row = item & ROW_MASK
            if state[row] <= QUEUED:
                pop(heap)
                state[row] = 0
            elif item != rank[row] | row:
                heapq.heapreplace(heap, rank[row] | row)
            else:
                pop(heap)
                state[row] = 0
                out.append(row)
                n -= 1
        return out

    def follow(self, rows: Sequence[int]) -> int:
        """See ``policy.Follower``."""
        rank, limit, n = self._rank, self._first(), 0
        for row in rows:
            if rank[row] | row > limit:
                break
            n += 1
        return n

    def _first(self) -> int:
        """Rank and row of the first candidate, which stays one; above all others where there is none."""
        state, rank, heap = self._state, self._rank, self._heap
        while heap:
            item = heap[0]
            row = item & ROW_MASK
            if state[row] <= QUEUED:
                heapq.heappop(heap)
                state[row] = 0
            elif item != rank[row] | row:
                heapq.heapreplace(heap, rank[row] | row)
            else:
                return item
        return (self._calls + 1) << ROW_BITS

    def removed(self, rows: Sequence[int]) -> None:
        state = self._state
        for row in rows:
            state[row] &= QUEUED

    def _grow(self, rows: int) -> None:
        more = max(rows - len(self._rank), len(self._rank) // 64, 1024)
        self._rank.extend([0] * more)
        self._state.extend(bytes(more))
