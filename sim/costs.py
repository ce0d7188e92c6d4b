"""What computing takes, by the formulas of a cluster file."""

from __future__ import annotations

import numpy as np

from moonpool.sim.cluster import DecodeCost, PrefillCost

DRAWN = 1_024  # at once


class Noise:
    """Factors around 1 that computing takes longer or shorter by. ``sigma`` 0: always 1."""

    def __init__(self, sigma: float, seed: int) -> None:
        self._sigma = sigma
        self._draws = np.random.default_rng(seed)
        self._ahead: list[float] = []

    def factor(self) -> float:
        if not self._sigma:
            return 1.0
        if not self._ahead:
            self._ahead = np.exp(self._draws.normal(0.0, self._sigma, DRAWN)).tolist()
        return self._ahead.pop()


def compute_s(cost: PrefillCost, begin: int, end: int) -> float:
    """Tokens [begin, end) of a prompt, what is before them being there."""
    seconds = cost.b * (end - begin) + cost.c * (end * end - begin * begin)
    return seconds * cost.chunk_factor if cost.chunk_tokens else seconds


def prefill_s(cost: PrefillCost, tokens: int, cached: int) -> float:
    """A prompt of which ``cached`` leading tokens come from the host's DRAM."""
    return cost.a + compute_s(cost, cached, tokens) + cost.d * cached


def tokens_left(cost: PrefillCost, end: int, seconds: float) -> int:
    """How many last tokens of a prompt of ``end`` take ``seconds`` to compute."""
    factor = cost.chunk_factor if cost.chunk_tokens else 1.0
    want = max(seconds / factor, 0.0)
    low, high = 0, end
    while low < high:
        middle = (low + high) // 2
        if cost.b * middle + cost.c * middle * (2 * end - middle) < want:
            low = middle + 1
        else:
            high = middle
    return low


def step_s(cost: DecodeCost, batch: int, context: int) -> float:
    """A decode step of ``batch`` sequences that read ``context`` tokens in all."""
    return cost.base_s + cost.per_sequence_s * batch + cost.per_token_s * context
