"""A short form of ``moonpool bench cancels``: every window, real processes, nothing left, no other answer changed."""

from __future__ import annotations

from moonpool.bench.cancels.run import CancelsOptions, cancels
from moonpool.core.windows import NAMES


def test_random_cancels_in_every_window_leave_nothing_behind() -> None:
    found = cancels(CancelsOptions(count=160, seed=7, decodes=1))
    assert not found["faults"], found
    assert found["cancels"] >= 160 and all(found["windows"][name] >= 8 for name in NAMES)
    assert found["clients_kept_answered"] > 0
    assert found["burst_answered"] + found["burst_refused"] == 300 and found["giant_s"] > 0
