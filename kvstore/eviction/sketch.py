"""How often keys were seen lately, in little memory: a count-min sketch of 4-bit counters that ages by halving.

After TinyLFU (Einziger, Friedman, Manes, ACM ToS 2017): four rows, conservative increments, and every counter halved once
``WINDOW`` times the capacity was added, so that old heat fades. It never undercounts within a window of one halving.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

DEPTH = 4
MOST = 15
WINDOW = 10
PER_KEY = 4  # counters in a row, for each key of the capacity


class FrequencySketch:
    def __init__(self, capacity: int, seed: int = 0) -> None:
        """``capacity``: keys it tells apart well. Takes ``8 * capacity`` bytes, rounded up to a power of two."""
        self._bits = max((PER_KEY * capacity - 1).bit_length(), 6)
        self._seed = seed
        self._table = bytearray((DEPTH << self._bits) // 2)  # two counters a byte
        self._added = 0
        self._window = WINDOW * max(capacity, 1)

    def __len__(self) -> int:
        """Bytes."""
        return len(self._table)

    def add(self, keys: Sequence[bytes]) -> None:
        table = self._table
        for key in keys:
            places = self._places(key)
            least = min(table[at >> 1] >> ((at & 1) << 2) & MOST for at in places)
            if least < MOST:
                for at in places:
                    shift = (at & 1) << 2
                    if table[at >> 1] >> shift & MOST == least:
                        table[at >> 1] += 1 << shift
            self._added += 1
            if self._added >= self._window:
                self._age()

    def estimate(self, key: bytes) -> int:
        """0 to 15; too high where other keys share all its counters."""
        table = self._table
        return min(table[at >> 1] >> ((at & 1) << 2) & MOST for at in self._places(key))

    def _places(self, key: bytes) -> tuple[int, int, int, int]:
        hashed, bits = xxhash.xxh3_128_intdigest(key, self._seed), self._bits
        mask = (1 << bits) - 1
        return (
            hashed & mask,
            (1 << bits) | (hashed >> 32 & mask),
            (2 << bits) | (hashed >> 64 & mask),
            (3 << bits) | (hashed >> 96 & mask),
        )

    def _age(self) -> None:
        counters = np.frombuffer(self._table, np.uint8)
        np.copyto(counters, counters >> 1 & 0x77)
        self._added //= 2
