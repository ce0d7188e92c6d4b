"""Gaps between the tokens of one request, from the runs of steps of its decode node."""

from __future__ import annotations

from array import array
from math import ceil

import numpy as np

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

    def slowest_s(self, begin: int, end: int, waits: list[tuple[int, float]]) -> float | None:
        """Of the runs [begin, end): mean of the slowest tenth of the gaps. ``waits``: (run, seconds) before its first step.

        None where there is no gap.
        """
        if end <= begin:
            return None
        steps = np.array(self._steps[begin:end])
        first = np.array(self._first[begin:end])
        slope = np.array(self._slope[begin:end])
        ends = np.cumsum(steps)
        total = int(ends[-1])
        starts = ends - steps
        gaps = np.repeat(first - slope * starts, steps) + np.repeat(slope, steps) * np.arange(total)
        for run, seconds in waits:
            gaps[starts[run - begin]] += seconds
        n = ceil(total * SLOWEST)
        return float(np.partition(gaps, total - n)[total - n :].mean())
