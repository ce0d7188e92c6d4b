from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.decode_worker.runs import Run
from moonpool.sim.gaps import Gaps

RUNS = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 0.2), st.floats(0.0, 1e-3)), min_size=1, max_size=12)


@given(runs=RUNS, begin=st.integers(0, 11), wait=st.floats(0.0, 5.0))
def test_the_slowest_tenth_is_that_of_all_gaps_written_out(
    runs: list[tuple[int, float, float]], begin: int, wait: float
) -> None:
    gaps = Gaps()
    for steps, first, slope in runs:
        gaps.add(Run(steps, 1, 1, first, slope))
    written = [[first + slope * i for i in range(steps)] for steps, first, slope in runs[begin:]]
    if not written:
        assert gaps.slowest_s([(begin, len(runs))], []) is None
        return
    written[0][0] += wait
    flat = sorted(gap for run in written for gap in run)
    n = ceil(len(flat) / 10)
    assert gaps.slowest_s([(begin, len(runs))], [(begin, wait)]) == pytest.approx(sum(flat[-n:]) / n)


def test_of_a_sequence_that_was_out_of_the_batch_its_absence_is_one_gap_and_others_steps_none() -> None:
    gaps = Gaps()
    for first in (0.01, 0.5, 0.02):
        gaps.add(Run(5, 1, 1, first, 0.0))
    assert gaps.slowest_s([(0, 1), (2, 3)], [(2, 2.5)]) == pytest.approx(2.52)
    assert gaps.slowest_s([(0, 1), (2, 3)], []) == pytest.approx(0.02)
