"""Decode steps that only differ in how long contexts have grown, as one thing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

ROUNDING = 1e-9  # relative: a time that was computed as a border is that border


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a step: ``base_s`` + ``per_token_s`` for every context token of the batch, one more a sequence each step."""

    base_s: float
    per_token_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """``steps`` equal steps of ``batch`` sequences; the first one read ``context`` tokens and took ``first_s``, each next one
    took ``slope_s`` more."""

    steps: int
    batch: int
    context: int
    first_s: float
    slope_s: float

    @property
    def seconds(self) -> float:
        return self.steps * self.first_s + self.slope_s * (self.steps * (self.steps - 1) / 2)

    def done_by(self, seconds: float) -> int:
        """The number of the first step that ends at ``seconds`` after the run's begin or later, from 1."""
        half = self.first_s - self.slope_s / 2  # steps * half + steps^2 * slope / 2 = seconds; above 0, a context has its batch
        exact = 2.0 * seconds / (half + sqrt(half * half + 2.0 * self.slope_s * max(seconds, 0.0)))
        return max(ceil(exact * (1.0 - ROUNDING)), 1)
