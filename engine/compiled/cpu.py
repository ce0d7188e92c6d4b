"""What the compiled step needs of the CPU."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm

_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512bf16")


def unfit_cpu() -> str | None:
    """Why this machine cannot compute it; None: it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"it is written for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    features = llvm.get_host_cpu_features()
    lacking = [name for name in _NEEDED if not features.get(name)]
    return f"the CPU lacks {', '.join(lacking)}" if lacking else None
