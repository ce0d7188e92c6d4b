"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023), among candidates.

New blocks enter a small queue of a tenth of what is here; those used again before they reach its end go to the main queue,
the others leave at once and only their keys are remembered (ghosts). A block whose ghost is still known enters the main
queue. The main queue gives a block one more round per use, three at most. Adapted: a queue's end is its oldest
*candidate*; the blocks it skips (they have children or pins) keep their places.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.use import Use
from moonpool.kvstore.eviction.ranking import Ranking

SMALL_SHARE = 0.1
MAIN_FROM = 2  # uses in the small queue that lead to the main queue
MOST_USES = 3
ABSENT, SMALL, MAIN = 0, 1, 2


class S3Fifo:
    name = "s3fifo"
    wants_keys = True

    def __init__(self) -> None:
        self._entered = 0
        self._small, self._main = Ranking(), Ranking()
        self._queue = bytearray()  # by row: ABSENT, SMALL or MAIN
        self._uses = bytearray()
        self._keys: list[bytes] = []
        self._sizes = [0, 0, 0]  # rows in SMALL and MAIN, candidates or not
        self._ghosts: dict[bytes, None] = {}  # oldest first, as many as the main queue has rows

    def named(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        self._grow(max(rows, default=-1) + 1)
        for row, key in zip(rows, keys, strict=True):
            self._keys[row] = key

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        pass

    def stored(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        self._grow(max(rows, default=-1) + 1)
        for row in rows:
            key = self._keys[row]
            known = key in self._ghosts
            if known:
                del self._ghosts[key]
            self._uses[row] = 0
            self._enter(row, MAIN if known else SMALL)

    def used(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        uses = self._uses
        for row in rows:
            if uses[row] < MOST_USES:
                uses[row] += 1

    def offer(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._ranking(self._queue[row]).offer((row,))

    def withhold(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._ranking(self._queue[row]).withhold((row,))

    def choose(self, n: int, now: float) -> list[int]:
        out: list[int] = []
        while len(out) < n and (row := self._victim()) is not None:
            out.append(row)
            self._leave(row)
        return out

    def removed(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self._queue[row] != ABSENT:
                self.withhold((row,))
                self._leave(row)
            self._keys[row] = b""

    def _victim(self) -> int | None:
        """The next candidate to go, after moving up those that earned another round."""
        while True:
            small, main = self._small.peek(), self._main.peek()
            if small is None and main is None:
                return None
            crowded = self._sizes[SMALL] > SMALL_SHARE * (self._sizes[SMALL] + self._sizes[MAIN])
            if small is not None and (crowded or main is None):
                self._small.withhold((small,))
                if self._uses[small] < MAIN_FROM:
                    self._remember(self._keys[small])
                    return small
                self._uses[small] = 0
                self._sizes[SMALL] -= 1
                self._enter(small, MAIN)
                self._main.offer((small,))
            elif main is not None:
                self._main.withhold((main,))
                if not self._uses[main]:
                    return main
                self._uses[main] -= 1
                self._sizes[MAIN] -= 1
                self._enter(main, MAIN)
                self._main.offer((main,))

    def _ranking(self, queue: int) -> Ranking:
        return self._main if queue == MAIN else self._small

    def _enter(self, row: int, queue: int) -> None:
        self._entered += 1
        self._queue[row] = queue
        self._ranking(queue).rank[row] = self._entered
        self._sizes[queue] += 1

    def _leave(self, row: int) -> None:
        self._sizes[self._queue[row]] -= 1
        self._queue[row] = ABSENT

    def _remember(self, key: bytes) -> None:
        if key:
            self._ghosts[key] = None
        while len(self._ghosts) > self._sizes[MAIN] + 1:
            del self._ghosts[next(iter(self._ghosts))]

    def _grow(self, rows: int) -> None:
        self._small.grow(rows)
        self._main.grow(rows)
        more = len(self._small.rank) - len(self._queue)
        self._queue.extend(bytes(more))
        self._uses.extend(bytes(more))
        self._keys.extend([b""] * more)
