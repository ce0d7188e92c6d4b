"""Kernels in Triton's interpreter, which keeps the kernel at hand in variables of its module: one at a time in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
_ONE_AT_A_TIME = threading.Lock()


class _Interpreted:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        run = self._kernel[grid]

        def launch(*given: Any, **named: Any) -> None:
            with _ONE_AT_A_TIME:
                run(*given, **named)

        return launch


def compiled_for(device: torch.device) -> bool:
    """Whether kernels run on ``device`` as its own code: then they may be measured, and captured in graphs."""
    return device.type == "cuda" and not INTERPRETED


def launched(kernel: Any) -> Any:
    """``kernel`` for any thread to launch, as ``launched(kernel)[grid](...)``."""
    return _Interpreted(kernel) if INTERPRETED else kernel
