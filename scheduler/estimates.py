"""How long a prefill and a decode step take, fitted online from what workers measured.

Non-negative least squares over a bounded set of measurements, minimising relative error: a 50 ms job weighs as much as
an 8 s one. One reweighting pass (Huber) keeps a first, cold run from bending the fit. Bounds are quantiles of measured
over estimated seconds. A fit is made anew once in a few dozen measurements, or when they leave its bounds: reading it
costs nothing, and it is read for every placement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moonpool.core.membership import PrefillTiming, StepTiming

Vector = NDArray[np.float64]

MIN_SAMPLES = 4
PER_KIND = 8
KINDS = 128
HALF_LIFE = 128  # measurements until an old one weighs half
OLD_WEIGHT = 0.02  # what it weighs at least: where nothing newer speaks, it still does
PLAUSIBLE_S = (1e-6, 1e5)
SPREAD_QUANTILE = 0.8
MAX_SPREAD = 1.0  # measurements that scatter more say little; 1.0 doubles the estimate already
REACH = 4.0  # an estimate is trusted up to this many times the largest job measured
RIDGE = 1e-4  # relative to each feature's own weight: a set of equal jobs is spread over all features
HUBER = 0.25  # relative residual from which a sample counts less
REFIT_SHARE = 4  # a fit is made anew after a quarter as many measurements again,
REFIT_MOST = 48  # but at the latest after so many,
SURPRISES = 8  # or when so many more lay outside its bounds than a well-made fit lets through
SEED_WEIGHT = 0.5  # of a seed, in measurements: it decides what they leave open, and soon nothing
NEWEST = 16  # jobs of one worker that say how fast it is,
EVEN = 8  # beside so many that took as long as those like it take: fewer say nothing
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # of ``Fit.ratios``
UNKNOWN = (0.2, 0.3, 0.6, 1.0, 1.7, 3.0, 5.0)  # ratios of a seed nobody has checked yet


@dataclass(frozen=True, slots=True)
class Fit:
    """``seconds = coefficients @ features``, relative ``spread`` above it, valid for jobs up to ``reach``.

    ``ratios`` are the ``LEVELS`` quantiles of measured over estimated seconds.
    """

    coefficients: tuple[float, ...]
    spread: float
    reach: float
    sure: bool
    ratios: tuple[float, ...] = UNKNOWN

    def times(self, factor: float) -> Fit:
        return replace(self, coefficients=tuple(factor * c for c in self.coefficients))

    def ratio(self, level: float) -> float:
        """Measured over estimated seconds: the quantile at ``level``, from 0.05 to 0.95."""
        return float(np.interp(level, LEVELS, self.ratios))

    def chance_over(self, ratio: float) -> float:
        """The probability that a job takes longer than ``ratio`` times its estimate; from 0.05 to 0.95."""
        return 1.0 - float(np.interp(ratio, self.ratios, LEVELS))


class OnlineFit:
    """Measurements of one worker (or of a role), the newest few of every kind of job.

    Jobs are alike when each of their features has the same power of two: a busy hour of one kind then does not push out
    what is known of the others. ``guess`` ranks jobs while there are fewer than ``MIN_SAMPLES`` measurements; a ``seed``,
    computed for this model and machine, does so too and stays in the fit as ``seed_weight`` measurements. ``surprises``: a fit
    is made anew after so many measurements outside its bounds.
    """

    def __init__(
        self,
        guess: Sequence[float],
        seed: Sequence[float] | None = None,
        *,
        seed_weight: float = SEED_WEIGHT,
        surprises: float = SURPRISES,
    ) -> None:
        self._seed_weight, self._surprises = seed_weight, surprises
        self._seed = None if seed is None else np.array(seed, np.float64)
        self._kinds: dict[tuple[int, ...], deque[tuple[float, ...]]] = {}  # kind -> rows of (*features, seconds, number)
        self._samples = 0
        self._reach = 0.0
        self._fit = Fit(tuple(guess if seed is None else seed), 0.0, 0.0, sure=False)
        self._due = MIN_SAMPLES  # measurements at which the fit is made anew
        self._surprise = 0.0

    def add(self, features: tuple[float, ...], seconds: float, size: float) -> None:
        """Impossible values are skipped: they come from another process. ``size`` is compared with ``reach``."""
        if not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        kind = tuple(int(value).bit_length() for value in features)
        rows = self._kinds.pop(kind, None) or deque(maxlen=PER_KIND)
        self._samples += 1
        rows.append((*features, seconds, float(self._samples)))
        self._kinds[kind] = rows
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]  # the one longest without news
        self._reach = max(self._reach, REACH * size)
        self._watch(features, seconds)

    def _watch(self, features: tuple[float, ...], seconds: float) -> None:
        """A tenth of the measurements lies outside the bounds of a fit that holds; each of them outweighs nine inside."""
        fit = self._fit
        if not fit.sure:
            return
        estimated = sum(c * f for c, f in zip(fit.coefficients, features, strict=True))
        inside = fit.ratios[0] * estimated <= seconds <= fit.ratios[-1] * estimated
        self._surprise = max(0.0, self._surprise - 0.25) if inside else self._surprise + 1.0
        if self._surprise >= self._surprises:
            self._due = self._samples

    @property
    def fit(self) -> Fit:
        if self._samples >= self._due:
            self._fit = self._solve()
            self._due = self._samples + min(max(1, self._samples // REFIT_SHARE), REFIT_MOST)
            self._surprise = 0.0
        elif self._fit.reach != self._reach and self._fit.sure:
            self._fit = replace(self._fit, reach=self._reach)
        return self._fit

    def _solve(self) -> Fit:
        table = np.array([row for rows in self._kinds.values() for row in rows])
        rows = table[:, :-2] / table[:, -2:-1]  # [samples, features]; every target is 1
        fresh = np.maximum(0.5 ** ((self._samples - table[:, -1]) / HALF_LIFE), OLD_WEIGHT)
        weights = fresh
        for _ in range(2):
            coefficients = _non_negative(rows, weights, self._seed, self._seed_weight)
            residuals = 1.0 - rows @ coefficients
            weights = fresh * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-9))
        ratios = 1.0 / np.maximum(rows @ coefficients, 1e-9)  # the rows are in units of the measured time
        levels = np.quantile(ratios, (*LEVELS, SPREAD_QUANTILE), weights=fresh, method="inverted_cdf")
        spread = float(np.clip(levels[-1] - 1.0, 0.0, MAX_SPREAD))
        return Fit(tuple(map(float, coefficients)), spread, self._reach, sure=True, ratios=tuple(map(float, levels[:-1])))


@cache
def _subsets(features: int) -> Vector:
    """[2**features - 1, features] of 0 and 1: every non-empty choice of features."""
    numbers = np.arange(1, 2**features)
    return ((numbers[:, None] >> np.arange(features)) & 1).astype(np.float64)


def _non_negative(rows: Vector, weights: Vector, seed: Vector | None, seed_weight: float) -> Vector:
    """Weighted non-negative least squares towards 1. At most five features, so every active set is solved and compared.

    ``seed`` draws the coefficients towards it with the weight of ``seed_weight`` rows.
    """
    scale = np.sqrt((rows**2).mean(axis=0))
    scale[scale == 0.0] = 1.0
    x = rows / scale
    gram = (x * weights[:, None]).T @ x
    gram[np.diag_indices_from(gram)] *= 1.0 + RIDGE
    gram[np.diag_indices_from(gram)] += 1e-12
    right = x.T @ weights
    if seed is not None:
        gram[np.diag_indices_from(gram)] += seed_weight
        right += seed_weight * seed * scale
    chosen = _subsets(x.shape[1])
    among = gram * chosen[:, :, None] * chosen[:, None, :] + np.eye(x.shape[1]) * (1.0 - chosen)[:, :, None]
    solutions = np.linalg.solve(among, (right * chosen)[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", solutions, gram, solutions) - 2.0 * solutions @ right
    loss[(solutions < 0.0).any(axis=1)] = np.inf
    return np.asarray(solutions[int(np.argmin(loss))] / scale)


class PrefillEstimate:
    """Seconds = a + b (n - p) + c (n^2 - p^2) + d loaded, for n prompt tokens of which p are cached and ``loaded`` of
    those come from the pool. The form is that of the paper's fitted prefill cost (Mooncake, FAST 2025).

    Chunks of one size cost seconds per computed token, so b holds what chunking costs. Loads overlap with the compute of
    earlier layers: d holds what of them is not hidden.
    """

    GUESS = (1e-2, 1e-3, 0.0, 1e-5)

    def __init__(self, seed: Sequence[float] | None = None) -> None:
        """``seed``: a, b, c, d as computed by ``roofline`` for this model and machine."""
        self._online = OnlineFit(self.GUESS, seed)

    def add(self, timing: PrefillTiming) -> None:
        features, seconds = _prefill_job(timing)
        self._online.add(features, seconds, features[1])

    @property
    def fit(self) -> Fit:
        """Four coefficients (a, b, c, d); reach in computed tokens."""
        return self._online.fit


def _prefill_job(timing: PrefillTiming) -> tuple[tuple[float, ...], float]:
    """Features, and the seconds that are the worker's own."""
    n, p = timing.prompt_tokens, min(timing.cached_tokens, timing.prompt_tokens)
    loaded = timing.loaded_tokens or (p if timing.load_seconds > 0.0 else 0)
    seconds = timing.seconds - max(timing.fetch_seconds, 0.0)  # what came from other nodes, ``links`` predicts
    return (1.0, float(n - p), float(n * n - p * p), float(loaded)), seconds


class Speed:
    """How many times as long a worker takes as all that are like it: the median of its newest jobs.

    What such workers take is fitted on the jobs of all of them. Fitted each on its own, equal workers would differ wherever
    their few jobs leave a fit open, and everything would go to the one that is thought to be faster.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._jobs: deque[tuple[tuple[float, ...], float]] = deque(maxlen=NEWEST)

    def add(self, timing: PrefillTiming) -> None:
        """Impossible values are skipped, as in a fit."""
        features, seconds = _prefill_job(timing)
        if PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            self._jobs.append((features, seconds))

    def compare(self, fit: Fit) -> None:
        """``fit``: of all that are like it."""
        likely = [sum(c * f for c, f in zip(fit.coefficients, features, strict=True)) for features, _ in self._jobs]
        ratios = [seconds / max(each, 1e-9) for each, (_, seconds) in zip(likely, self._jobs, strict=True)]
        self.factor = float(np.median([*ratios, *(1.0,) * EVEN]))


class StepEstimate:
    """Seconds = a + b batch + c context tokens in the batch."""

    GUESS = (1e-2, 1e-3, 1e-7)

    def __init__(self, seed: Sequence[float] | None = None) -> None:
        """``seed``: a, b, c as computed by ``roofline`` for this model and machine."""
        self._online = OnlineFit(self.GUESS, seed)

    def add(self, timing: StepTiming) -> None:
        features = (1.0, float(timing.batch), float(timing.context_tokens))
        self._online.add(features, timing.seconds, timing.context_tokens)

    @property
    def fit(self) -> Fit:
        """Three coefficients (a, b, c); reach in context tokens."""
        return self._online.fit


@dataclass(frozen=True, slots=True)
class Seeds:
    """Coefficients of both estimates for one model and machine (``roofline.Roofline``); None: nothing is known."""

    prefill: tuple[float, float, float, float] | None = None
    step: tuple[float, float, float] | None = None


class Overhead:
    """Seconds between what the worker's own times explain and the first token at the gateway, seen on idle workers."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=64)
        self._seconds = 0.0

    def add(self, seconds: float) -> None:
        if seconds == seconds and abs(seconds) != float("inf"):
            self._seen.append(seconds)
            self._seconds = max(0.0, float(np.median(self._seen)))

    @property
    def seconds(self) -> float:
        return self._seconds
