"""How long one call takes: the median, and the 99th percentile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def microseconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e6


def quantiles(name: str, taken: list[float]) -> dict[str, float]:
    """Of times in microseconds: ``NAME_us`` and ``NAME_p99_us``."""
    return {f"{name}_us": statistics.median(taken), f"{name}_p99_us": statistics.quantiles(taken, n=100)[98]}


def timed(name: str, call: Callable[[int], object], rounds: int) -> dict[str, float]:
    """``call(0)``, ``call(1)``, ... one by one."""
    return quantiles(name, [microseconds(lambda i=i: call(i)) for i in range(rounds)])  # type: ignore[misc]
