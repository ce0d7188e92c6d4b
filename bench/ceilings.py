"""What this machine can do at best, for the bounds of figures: reading memory, and multiplying bf16 matrices, on all cores.

Keys: ``read_gb_s`` (summing 512 MiB), ``gemm_gflop_s`` (2,048 cubed, bf16). Best of several, in a process of its own: run as
``python -m moonpool.bench.ceilings THREADS``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

_BYTES = 512 << 20
_SIDE = 2_048
_TIMES = 7
_LIMIT_S = 120.0


def ceilings(threads: int) -> dict[str, float]:
    """Measured in a child process. CalledProcessError or TimeoutExpired where it does not answer."""
    done = subprocess.run(
        [sys.executable, "-m", "moonpool.bench.ceilings", str(threads)],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _measure(threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(_BYTES // 4)
    square = torch.rand(_SIDE, _SIDE).bfloat16()
    return {
        "read_gb_s": _BYTES / _best_s(numbers.sum) / 1e9,
        "gemm_gflop_s": 2 * _SIDE**3 / _best_s(lambda: square @ square) / 1e9,
    }


def _best_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]))))
