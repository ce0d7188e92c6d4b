"""Gaps between the tokens of one request, from the runs of steps of its decode node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from moonpool.decode_worker.runs import Run

SLOWEST = 0.1  # the time between tokens of a request is the mean of this share of its gaps (Mooncake, FAST 2025, section 8)


class Gaps:
    """Runs of steps of one decode node, in order: every sequence in the batch sees each step as one gap."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._first = array("d")
        self._slope = array("d")

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, run: Run) -> None:
        self._steps.append(run.steps)
        self._first.append(run.first_s)
        self._slope.append(run.slope_s)

    def slowest_s(self, spans: Sequence[tuple[int, int]], waits: Sequence[tuple[int, float]]) -> float | None:
        """Mean of the slowest tenth of the gaps of a sequence that was in the batch in the runs [begin, end) of ``spans``.

        ``waits``: (run, seconds) that passed for it before the first step of that run. None where there is no gap.
        """
        parts = [self._written(begin, end, waits) for begin, end in spans if begin < end]
        if not parts:
            return None
        gaps = parts[0] if len(parts) == 1 else np.concatenate(parts)
        n = ceil(len(gaps) * SLOWEST)
        return float(np.partition(gaps, len(gaps) - n)[len(gaps) - n :].mean())

    def _written(self, begin: int, end: int, waits: Sequence[tuple[int, float]]) -> NDArray[np.float64]:
        steps = np.array(self._steps[begin:end])
        first = np.array(self._first[begin:end])
        slope = np.array(self._slope[begin:end])
        ends = np.cumsum(steps)
        starts = ends - steps
        gaps: NDArray[np.float64] = np.repeat(first - slope * starts, steps) + np.repeat(slope, steps) * np.arange(ends[-1])
        for run, seconds in waits:
            if begin <= run < end:
                gaps[starts[run - begin]] += seconds
        return gaps
