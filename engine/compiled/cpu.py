"""What the compiled step needs of the CPU."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import llvmlite.binding as llvm
import numba

_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512bf16")


def _features() -> Mapping[str, bool]:
    """What numba compiles for: this CPU, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""
    told: str | None = numba.config.CPU_FEATURES
    if told is None:
        return dict(llvm.get_host_cpu_features())
    return {name[1:]: name.startswith("+") for name in told.split(",") if name}


def unfit_cpu() -> str | None:
    """Why this machine cannot compute it; None: it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it is written for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    features = _features()
    lacking = [name for name in _NEEDED if not features.get(name)]
    return f"the CPU, or what numba is told of it, lacks {', '.join(lacking)}" if lacking else None
