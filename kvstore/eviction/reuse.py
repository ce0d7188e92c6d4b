"""When requests of a kind come back: a discrete-time hazard of reuse, learned from what was seen.

A request is a row of *codes*, one per feature (which tenant and kind, turn, prompt length, ...); the model is that of
``hazard_tables``. From the hazards follows the *index* of a request at age a: the largest ratio of the chance of a return
within h to the expected time the block is held for it, over all h (an index in the manner of Gittins). Returns per held
second: the lower, the sooner it goes.

Traffic changes, and how fast nobody knows. So two memories are kept, a short and a long one, and the one is believed that
foretold the last minutes better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.kvstore.eviction.hazard_tables import BINS, EDGES, Sample, Tables

REMEMBERED = 1 << 13  # requests learned from, the newest: a fit over all of them stops the node for about 40 ms
HALF_LIVES = (16_000.0, 250.0)  # requests after which one weighs half: the long memory, the short one
MARGIN = 15.0  # of log-likelihood, by which the short memory must win: it knows less
KEPT = 0.9  # weight of earlier scores at each fit
LEAST_RETURNS = 8


class ReuseHazard:
    def __init__(self, codes: Sequence[int]) -> None:
        """``codes``: how many codes each feature has."""
        self._codes = np.zeros((REMEMBERED, len(codes)), np.int64)
        self._born = np.zeros(REMEMBERED)
        self._after = np.full(REMEMBERED, np.inf)  # age at the first return
        self._seen = 0
        self._memories = [Tables(codes) for _ in HALF_LIVES]
        self._scores = [0.0] * len(HALF_LIVES)
        self._fitted_at = 0.0
        self.returns = 0
        self.fitted = False

    def begin(self, codes: Sequence[int], now: float) -> int:
        """A request arrived. Returns its number, for ``followed``."""
        at = self._seen % REMEMBERED
        self._codes[at] = codes
        self._born[at] = now
        self._after[at] = np.inf
        self._seen += 1
        return self._seen - 1

    def recode(self, number: int, codes: Sequence[int]) -> None:
        """More became known about a request."""
        if number >= self._seen - REMEMBERED:
            self._codes[number % REMEMBERED] = codes

    def followed(self, number: int, now: float) -> None:
        """The next request of the conversation came; only the first time counts."""
        at = number % REMEMBERED
        if number >= self._seen - REMEMBERED and self._after[at] == np.inf:
            self._after[at] = now - self._born[at]
            self.returns += 1

    def fit(self, now: float) -> bool:
        """Learn anew from everything remembered; False, and nothing changed, before enough returns were seen."""
        if self.returns < LEAST_RETURNS:
            return False
        if self.fitted:
            self._score(now)
        for tables, half_life in zip(self._memories, HALF_LIVES, strict=True):
            tables.fit(self._sample(now, half_life))
        self.fitted, self._fitted_at = True, now
        return True

    def index(self, codes: Sequence[int]) -> NDArray[np.float64]:
        """[BINS]: returns per held second at the start of each age bin, for a request of these codes."""
        long, short = self._scores
        return self._memories[short > long + MARGIN].index(codes)

    def _score(self, now: float) -> None:
        """How well each memory foretold what happened since the last fit."""
        n = min(self._seen, REMEMBERED)
        born, after = self._born[:n, None], self._after[:n, None]
        starts, ends = EDGES[:-1], EDGES[1:]
        entered = (born + starts >= self._fitted_at) & (born + np.minimum(ends, after) <= now) & (after >= starts)
        ended = entered & (after < ends)
        active = entered.any(axis=1)
        for at, tables in enumerate(self._memories):
            told = tables.likelihood(self._codes[:n][active], entered[active], ended[active])
            self._scores[at] = KEPT * self._scores[at] + told

    def _sample(self, now: float, half_life: float) -> Sample:
        n = min(self._seen, REMEMBERED)
        after = self._after[:n]
        came = np.isfinite(after)
        age = np.where(came, after, now - self._born[:n])
        last = np.clip(np.searchsorted(EDGES, age, side="right") - 1, 0, BINS - 1)
        seconds = max(half_life * (now - float(self._born[:n].min())) / n, 1.0)
        weight, later = np.exp2((self._born[:n] - now) / seconds), np.exp2(EDGES[:-1] / seconds)
        return Sample(self._codes[:n], came, last, np.where(came, last + 1, last), weight, later)
