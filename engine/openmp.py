"""The OpenMP runtime that PyTorch itself computes on.

Kernels of ours run on its team of threads, which is awake between two operators of a layer. A runtime of their own (numba's
OpenMP layer links another copy, its other layers bring their own threads) would put a second team on the same cores, each
of them spinning in the other's way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

# A handle finds symbols of what it was linked with, too: this is the runtime of ``torch``, however its file is called.
_parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)  # LLVM's and Intel's runtimes have it as well
if _parallel is not None:
    _parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    _parallel.restype = None


def call_on_team(function: Any, argument: int, threads: int) -> None:
    """Call ``function`` (a numba ``cfunc`` of one pointer) with ``argument`` on ``threads`` threads at once, this one among
    them; on this one alone where PyTorch was built without OpenMP. Returns when all are through, and leaves the interpreter's
    lock to others meanwhile. ``threads`` is what PyTorch has in this thread, or 1: another number would make a new team."""
    if threads == 1 or _parallel is None:
        function.ctypes(argument)
    else:
        _parallel(function.address, argument, threads, 0)
