"""How long one call takes: the median, and the 99th percentile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def quantiles(name: str, call: Callable[[int], object], rounds: int) -> dict[str, float]:
    """Microseconds of ``call(0)``, ``call(1)``, ... one by one, as ``NAME_us`` and ``NAME_p99_us``."""
    taken = []
    for i in range(rounds):
        begun = time.perf_counter()
        call(i)
        taken.append((time.perf_counter() - begun) * 1e6)
    return {f"{name}_us": statistics.median(taken), f"{name}_p99_us": statistics.quantiles(taken, n=100)[98]}
