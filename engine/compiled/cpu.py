"""What the compiled step needs of the CPU."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Mapping

import llvmlite.binding as llvm
import numba

log = logging.getLogger(__name__)

_MATRIX = ("amx-tile", "amx-bf16")
_ASK_FOR_STATE, _TILE_DATA = 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
_ARCH_PRCTL = 158  # its number on x86-64
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


def has_matrix_unit() -> bool:
    """Whether numba compiles for a CPU with a matrix unit for bf16 (AMX); on x86-64 alone."""
    features = _features()
    return all(features.get(name) for name in _MATRIX)


def may_use_matrix_unit() -> bool:
    """Asks the kernel for it: 8 KiB more of state for each thread that uses it. Old kernels and sandboxes deny it."""
    if not has_matrix_unit():
        return False
    if ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0:
        return True
    log.warning("the matrix unit (AMX) of this CPU is not used, the kernel denies it: %s", os.strerror(ctypes.get_errno()))
    return False
