"""How often other nodes read each block here, lately: decaying counts in bounded memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

DECAY_S = 60.0  # so that a steady count reads as "per minute"
HALF_A_READ = 0.5  # what decayed since the first of a few reads must not hide the last one


class Heat:
    """``limit`` blocks are counted at most; where there are more, the colder half of them is forgotten."""

    def __init__(self, limit: int = 1 << 14) -> None:
        self._limit = limit
        self._counts: dict[bytes, tuple[float, float]] = {}  # count, and when that was

    def __len__(self) -> int:
        return len(self._counts)

    def read(self, keys: Iterable[bytes], now: float) -> None:
        """Somebody elsewhere read ``keys``."""
        for key in keys:
            self._counts[key] = (self.per_minute(key, now) + 1.0, now)
        if len(self._counts) > self._limit:
            hottest = sorted(self._counts, key=lambda key: self.per_minute(key, now), reverse=True)
            self._counts = {key: self._counts[key] for key in hottest[: self._limit // 2]}

    def per_minute(self, key: bytes, now: float) -> float:
        count, when = self._counts.get(key, (0.0, now))
        return count * math.exp((when - now) / DECAY_S)

    def hot(self, keys: Sequence[bytes], reads: int, now: float) -> int:
        """How many of the leading ``keys`` were read at least ``reads`` times a minute."""
        return sum(1 for _ in takewhile(lambda key: self.per_minute(key, now) + HALF_A_READ > reads, keys))

    def forget(self, keys: Iterable[bytes]) -> None:
        """They start at zero again: there is another copy now, or nobody who could take one."""
        for key in keys:
            self._counts.pop(key, None)
