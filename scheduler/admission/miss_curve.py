"""How often a target is missed, by how close to it the prediction was: learned from how accepted requests ended.

First the error: measured over predicted latency of those of the newest requests that were let in closest to the edge. The
share of errors above target over prediction is the chance of a miss, also where nobody has been let in yet. Then outcomes
fall into buckets of predicted latency over target, each bucket's share of misses starts from the first chance, and the
shares are made never to fall as the ratio grows: isotonic regression by pooling adjacent violators (Ayer et al., 1955).
"""

from __future__ import annotations

import bisect
import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOWEST, HIGHEST, WIDTH = 0.5, 1.5, 0.01  # of predicted over target; what lies outside shares the outermost buckets
ERRORS = 400  # newest ones kept
CLOSEST = 0.25  # share of them that says what happens at the edge: who came to a half empty worker saw it fill up
LOADED = 0.5  # ratio from which on an error is kept
FIRST_ERROR = 0.01  # relative error of predictions nobody has checked yet: refuse only what surely misses
FIRST_WEIGHT = 20.0  # of that assumption, in outcomes
PRIOR_WEIGHT = 2.0  # of the errors' word, in outcomes per bucket
HALF_LIFE = 1_000.0  # outcomes until one weighs half in its bucket
READ_EVERY = 16  # outcomes between two looks at the errors


class MissCurve:
    """``chance(ratio)`` never falls as ``ratio`` grows."""

    def __init__(self) -> None:
        self._edges: Floats = np.arange(LOWEST, HIGHEST + WIDTH / 2, WIDTH)
        self._middles: Floats = np.append(self._edges[0] - WIDTH, self._edges) + WIDTH / 2
        self._first_middle = float(self._middles[0])
        self._first: Floats = np.array(
            [0.5 * (1.0 + math.erf((m - 1.0) / FIRST_ERROR / math.sqrt(2.0))) for m in self._middles]
        )
        self._errors: deque[tuple[float, float]] = deque(maxlen=ERRORS)  # ratio, measured over predicted
        self._missed: Floats = np.zeros(len(self._middles))
        self._seen: Floats = np.zeros(len(self._middles))
        self._added = 0
        self._curve: list[float] = self._first.tolist()

    def add(self, ratio: float, measured: float) -> None:
        """A request accepted with prediction over target ``ratio`` has ended; ``measured``: latency over target."""
        if not (math.isfinite(ratio) and math.isfinite(measured) and ratio > 0.0):
            return
        bucket = int(np.searchsorted(self._edges, ratio, side="right"))
        left = 0.5 ** (1.0 / HALF_LIFE)
        self._missed *= left
        self._seen *= left
        self._missed[bucket] += measured > 1.0
        self._seen[bucket] += 1.0
        if ratio >= LOADED:
            self._errors.append((ratio, measured / ratio))
        self._added += 1
        if self._added % READ_EVERY == 0:
            self._curve = self._read()

    def chance(self, ratio: float) -> float:
        """Of missing the target."""
        place = min(max((ratio - self._first_middle) / WIDTH, 0.0), len(self._curve) - 1.0)
        at = min(int(place), len(self._curve) - 2)
        low, high = self._curve[at], self._curve[at + 1]
        return low + (place - at) * (high - low)

    def highest(self, chance: float) -> float:
        """The largest ratio at which a miss is no likelier than ``chance``; 0 where there is none."""
        values = self._curve
        if values[0] > chance:
            return 0.0
        i = bisect.bisect_right(values, chance)
        if i == len(values):
            return math.inf
        low, high = values[i - 1], values[i]
        return float(self._middles[i - 1] + (chance - low) / (high - low) * (self._middles[i] - self._middles[i - 1]))

    def _read(self) -> list[float]:
        table = np.array(self._errors).reshape(-1, 2)
        closest = table[table[:, 0] >= np.quantile(table[:, 0], 1.0 - CLOSEST)] if len(table) else table
        errors = np.sort(closest[:, 1])
        over = len(errors) - np.searchsorted(errors, 1.0 / self._middles, side="right")
        prior = (over + self._first * FIRST_WEIGHT) / (len(errors) + FIRST_WEIGHT)
        weights = self._seen + PRIOR_WEIGHT
        return never_falling((self._missed + prior * PRIOR_WEIGHT) / weights, weights)


def never_falling(values: Floats, weights: Floats) -> list[float]:
    """The closest never falling sequence, by weighted squares."""
    pools: list[tuple[float, float, int]] = []  # value, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while pools and pools[-1][0] >= value:
            before, heavy, long = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, length = heavy + weight, long + length
        pools.append((value, weight, length))
    return [value for value, _, length in pools for _ in range(length)]
