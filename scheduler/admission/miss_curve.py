"""How often a target is missed, by how close to it the prediction was: learned from how accepted requests ended.

Outcomes fall into buckets of predicted latency over target; each bucket starts from what a good prediction would do (a
miss above 1, none below), and the shares are made never to fall as the ratio grows: isotonic regression by pooling
adjacent violators (Ayer et al., 1955). Old outcomes fade.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOWEST, HIGHEST, WIDTH = 0.4, 1.4, 0.05  # of predicted over target; what lies outside shares the outermost buckets
FIRST_ERROR = 0.02  # relative error of predictions that nobody has checked yet: refuse only what surely misses
FIRST_WEIGHT = 10.0  # of the first curve, in outcomes per bucket
HALF_LIFE = 1_000.0  # outcomes until one weighs half


class MissCurve:
    """``chance(ratio)`` never falls as ``ratio`` grows."""

    def __init__(self) -> None:
        self._edges: Floats = np.arange(LOWEST, HIGHEST + WIDTH / 2, WIDTH)
        self._middles: Floats = np.append(self._edges[0] - WIDTH, self._edges) + WIDTH / 2
        self._first = np.array([0.5 * (1.0 + math.erf((m - 1.0) / FIRST_ERROR / math.sqrt(2.0))) for m in self._middles])
        self._missed: Floats = np.zeros(len(self._middles))
        self._seen: Floats = np.zeros(len(self._middles))
        self._curve: Floats | None = None

    def add(self, ratio: float, missed: bool) -> None:
        """A request accepted with prediction over target ``ratio`` has ended."""
        if not math.isfinite(ratio):
            return
        bucket = int(np.searchsorted(self._edges, ratio, side="right"))
        left = 0.5 ** (1.0 / HALF_LIFE)
        self._missed *= left
        self._seen *= left
        self._missed[bucket] += missed
        self._seen[bucket] += 1.0
        self._curve = None

    def chance(self, ratio: float) -> float:
        """Of missing the target."""
        return float(np.interp(ratio, self._middles, self._values()))

    def highest(self, chance: float) -> float:
        """The largest ratio at which a miss is no likelier than ``chance``; 0 where there is none."""
        values = self._values()
        if values[0] > chance:
            return 0.0
        i = int(np.searchsorted(values, chance, side="right"))
        if i == len(values):
            return math.inf
        low, high = values[i - 1], values[i]
        return float(self._middles[i - 1] + (chance - low) / (high - low) * (self._middles[i] - self._middles[i - 1]))

    def _values(self) -> Floats:
        if self._curve is None:
            weights = self._seen + FIRST_WEIGHT
            self._curve = never_falling((self._missed + self._first * FIRST_WEIGHT) / weights, weights)
        return self._curve


def never_falling(values: Floats, weights: Floats) -> Floats:
    """The closest never falling sequence, by weighted squares."""
    pools: list[tuple[float, float, int]] = []  # value, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        length = 1
        while pools and pools[-1][0] >= value:
            before, heavy, long = pools.pop()
            value = (before * heavy + value * weight) / (heavy + weight)
            weight, length = heavy + weight, long + length
        pools.append((value, weight, length))
    return np.concatenate([np.full(length, value) for value, _, length in pools])
