"""Tables of a proportional-hazards model, and how they are fitted. Pure.

    hazard[bin] = base[bin] * product over features f of factor[f][code of f][phase of bin]

A factor is found by backfitting: (returns seen + s) / (returns expected by everything else + s), so that a code seen
seldom backs off to what the coarser tables say, and one never seen to 1. Requests not followed yet count with the age
they have survived (right-censored).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EDGES = np.array(
    [0, 10, 20, 30, 40, 50, 60, 75, 90, 105, 120, 140, 160, 180, 210, 240, 270, 300, 360, 420, 480, 540, 600]
    + [720, 840, 1_000, 1_200, 1_500, 1_800, 2_400, 3_600, 7_200],
    np.float64,
)
BINS = len(EDGES) - 1
WIDTH = np.diff(EDGES)
PHASES = np.searchsorted(np.array([20.0, 60.0, 180.0, 600.0]), EDGES[:-1], side="right")  # of each bin
PHASE_COUNT = int(PHASES[-1]) + 1
SWEEPS = 3
STRENGTH = 8.0  # returns that the prior of a code's factor weighs
PHASE_STRENGTH = 10.0  # returns that a code's factor of all ages weighs in each phase
BASE_STRENGTH = 200.0  # requests at risk that the neighbouring bin weighs
LEAST_HAZARD, MOST_HAZARD = 1e-6, 0.9


@dataclass(frozen=True, slots=True)
class Sample:
    """Of each request remembered: its codes, whether it was followed, and when."""

    codes: NDArray[np.int64]
    came: NDArray[np.bool_]
    last: NDArray[np.int64]  # the bin of the return, or of the age so far
    reached: NDArray[np.int64]  # bins survived, or ended by the return
    weight: NDArray[np.float64]  # of what was seen at its arrival
    later: NDArray[np.float64]  # [BINS]: how much more counts what was seen of it at that age


class Tables:
    """What one fit learned."""

    def __init__(self, codes: Sequence[int]) -> None:
        """``codes``: how many codes each feature has."""
        self._factors = [np.ones((n, PHASE_COUNT)) for n in codes]
        self._base = np.zeros(BINS)

    def fit(self, seen: Sample) -> None:
        """Learn anew from ``seen`` alone."""
        for table in self._factors:
            table.fill(1.0)
        product = np.ones((len(seen.weight), PHASE_COUNT))
        for _ in range(SWEEPS):
            self._fit_base(seen, product)
            held = self._expected(seen)
            for f, table in enumerate(self._factors):
                self._fit_factor(table, seen.codes[:, f], seen, held, product)
        self._fit_base(seen, product)

    def _fit_base(self, seen: Sample, product: NDArray[np.float64]) -> None:
        """Returns over the weight at risk in each bin, drawn towards the rate of the bin before where few were seen."""
        events = np.bincount(seen.last[seen.came], seen.weight[seen.came], minlength=BINS) * seen.later
        risk = np.empty(BINS)
        for phase in range(PHASE_COUNT):
            ending = np.bincount(seen.reached, product[:, phase] * seen.weight, minlength=BINS + 1)
            at_risk = ending[::-1].cumsum()[::-1][1:]  # [b]: weight of those that reach past the start of bin b
            risk[phase == PHASES] = (at_risk * seen.later)[phase == PHASES]
        rate = events.sum() / max(float((risk * WIDTH).sum()), 1.0)
        for b in range(BINS):
            prior = rate * WIDTH[b]
            self._base[b] = (events[b] + BASE_STRENGTH * prior) / (risk[b] + BASE_STRENGTH)
            rate = self._base[b] / WIDTH[b]

    def _expected(self, seen: Sample) -> NDArray[np.float64]:
        """[request, phase]: weighted returns that the base alone expects over the bins the request reached."""
        out = np.empty((len(seen.weight), PHASE_COUNT))
        for phase in range(PHASE_COUNT):
            sums = np.concatenate(([0.0], np.cumsum(np.where(phase == PHASES, self._base * seen.later, 0.0))))
            out[:, phase] = sums[seen.reached] * seen.weight
        return out

    def _fit_factor(
        self,
        table: NDArray[np.float64],
        codes: NDArray[np.int64],
        seen: Sample,
        held: NDArray[np.float64],
        product: NDArray[np.float64],
    ) -> None:
        """A code's factor is first that of all ages, then that of each phase drawn towards it."""
        shape = table.shape
        others = product / table[codes]
        cells = codes[seen.came] * PHASE_COUNT + PHASES[seen.last[seen.came]]
        weight = seen.weight[seen.came] * seen.later[seen.last[seen.came]]
        came = np.bincount(cells, weight, minlength=table.size).reshape(shape)
        expected = np.column_stack([np.bincount(codes, held[:, p] * others[:, p], minlength=shape[0]) for p in range(shape[1])])
        overall = (came.sum(axis=1) + STRENGTH) / (expected.sum(axis=1) + STRENGTH)
        table[:] = overall[:, None] * (came + PHASE_STRENGTH) / (expected * overall[:, None] + PHASE_STRENGTH)
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

    def likelihood(self, codes: NDArray[np.int64], entered: NDArray[np.bool_], ended: NDArray[np.bool_]) -> float:
        """Log-likelihood of what happened: the bins [request, BINS] that requests entered, and the one of their return."""
        factor = np.ones((len(codes), PHASE_COUNT))
        for f, table in enumerate(self._factors):
            factor *= table[codes[:, f]]
        hazard = np.clip(self._base * factor[:, PHASES], LEAST_HAZARD, MOST_HAZARD)
        return float(np.log(np.where(ended, hazard, 1.0 - hazard), where=entered, out=np.zeros_like(hazard)).sum())
