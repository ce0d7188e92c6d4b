"""When requests of a kind come back: a discrete-time hazard of reuse, learned from what was seen.

A request is a row of *codes*, one per feature (which tenant and kind, turn, prompt length, ...). Its chance to be followed
by the next request of its conversation within an age bin, given that it was not before, is

    hazard[bin] = base[bin] * product over features f of factor[f][code of f][phase of bin]

a proportional-hazards model whose factors are tables. ``fit`` finds them by backfitting: a factor is (returns seen + s)
/ (returns expected by everything else + s), so that a code seen seldom backs off to what the coarser tables say, and one
never seen to 1. Requests not followed yet count with the age they have survived (right-censored).

From the hazards follows the *index* of a request at age a: the largest ratio of the chance of a return within h to the
expected time the block is held for it, over all h (an index in the manner of Gittins). Returns per held second: the lower,
the sooner it goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EDGES = np.array(
    [0, 10, 20, 30, 40, 50, 60, 75, 90, 105, 120, 140, 160, 180, 210, 240, 270, 300, 360, 420, 480, 540, 600]
    + [720, 840, 1_000, 1_200, 1_500, 1_800, 2_400, 3_600, 7_200],
    np.float64,
)
BINS = len(EDGES) - 1
WIDTH = np.diff(EDGES)
PHASES = np.searchsorted(np.array([60.0, 240.0, 900.0]), EDGES[:-1], side="right")  # of each bin
PHASE_COUNT = int(PHASES[-1]) + 1
REMEMBERED = 1 << 13  # requests learned from, the newest: a fit over all of them stops the node for about 20 ms
LEAST_RETURNS = 8
SWEEPS = 5
STRENGTH = 8.0  # returns that the prior of a code's factor weighs
PHASE_STRENGTH = 8.0  # returns that a code's factor of all ages weighs in each phase
BASE_STRENGTH = 30.0  # requests at risk that the neighbouring bin weighs
MOST_HAZARD = 0.9


class ReuseHazard:
    def __init__(self, codes: Sequence[int]) -> None:
        """``codes``: how many codes each feature has."""
        self._codes = np.zeros((REMEMBERED, len(codes)), np.int64)
        self._born = np.zeros(REMEMBERED)
        self._after = np.full(REMEMBERED, np.inf)  # age at the first return
        self._seen = 0
        self._factors = [np.ones((n, PHASE_COUNT)) for n in codes]
        self._base = np.zeros(BINS)
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
        n = min(self._seen, REMEMBERED)
        codes, after = self._codes[:n], self._after[:n]
        came = np.isfinite(after)
        age = np.where(came, after, now - self._born[:n])
        last = np.clip(np.searchsorted(EDGES, age, side="right") - 1, 0, BINS - 1)
        reached = np.where(came, last + 1, last)  # bins survived, or ended by the return
        events = np.bincount(last[came], minlength=BINS).astype(np.float64)
        self._factors = [np.ones_like(table) for table in self._factors]
        product = np.ones((n, PHASE_COUNT))
        for _ in range(SWEEPS):
            self._fit_base(events, reached, product)
            held = self._expected(reached)
            for f, table in enumerate(self._factors):
                self._fit_factor(table, codes[:, f], came, last, held, product)
        self._fit_base(events, reached, product)
        self.fitted = True
        return True

    def _fit_base(self, events: NDArray[np.float64], reached: NDArray[np.int64], product: NDArray[np.float64]) -> None:
        """Returns over the weight at risk in each bin, drawn towards the rate of the bins around where few were seen."""
        risk = np.empty(BINS)
        for phase in range(PHASE_COUNT):
            ending = np.bincount(reached, weights=product[:, phase], minlength=BINS + 1)
            at_risk = ending[::-1].cumsum()[::-1][1:]  # [b]: weight of those that reach past the start of bin b
            risk[phase == PHASES] = at_risk[phase == PHASES]
        rate = events.sum() / max(float((risk * WIDTH).sum()), 1.0)
        for b in range(BINS):
            prior = rate * WIDTH[b]
            self._base[b] = (events[b] + BASE_STRENGTH * prior) / (risk[b] + BASE_STRENGTH)
            rate = self._base[b] / WIDTH[b]

    def _expected(self, reached: NDArray[np.int64]) -> NDArray[np.float64]:
        """[request, phase]: returns that the base alone expects over the bins the request reached."""
        out = np.empty((len(reached), PHASE_COUNT))
        for phase in range(PHASE_COUNT):
            sums = np.concatenate(([0.0], np.cumsum(np.where(phase == PHASES, self._base, 0.0))))
            out[:, phase] = sums[reached]
        return out

    def _fit_factor(
        self,
        table: NDArray[np.float64],
        codes: NDArray[np.int64],
        came: NDArray[np.bool_],
        last: NDArray[np.int64],
        held: NDArray[np.float64],
        product: NDArray[np.float64],
    ) -> None:
        """A code's factor is first that of all ages, then that of each phase drawn towards it."""
        n = len(table)
        others = product / table[codes]
        seen = np.bincount(codes[came] * PHASE_COUNT + PHASES[last[came]], minlength=n * PHASE_COUNT).reshape(n, PHASE_COUNT)
        expected = np.column_stack([np.bincount(codes, held[:, p] * others[:, p], minlength=n) for p in range(PHASE_COUNT)])
        overall = (seen.sum(axis=1) + STRENGTH) / (expected.sum(axis=1) + STRENGTH)
        table[:] = overall[:, None] * (seen + PHASE_STRENGTH) / (expected * overall[:, None] + PHASE_STRENGTH)
        product[:] = others * table[codes]

    def index(self, codes: Sequence[int]) -> NDArray[np.float64]:
        """[BINS]: returns per held second at the start of each age bin, for a request of these codes."""
        factor = np.ones(PHASE_COUNT)
        for table, code in zip(self._factors, codes, strict=True):
            factor = factor * table[code]
        hazard = np.minimum(self._base * factor[PHASES], MOST_HAZARD)
        alive = np.concatenate(([1.0], np.cumprod(1.0 - hazard)))
        held = np.concatenate(([0.0], np.cumsum(WIDTH * (alive[:-1] + alive[1:]) / 2)))
        chance = alive[:-1, None] - alive[None, 1:]
        time = held[None, 1:] - held[:-1, None]
        best: NDArray[np.float64] = np.where(time > 0, chance / np.where(time > 0, time, 1.0), 0.0).max(axis=1)
        return best
