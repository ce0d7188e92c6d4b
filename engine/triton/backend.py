"""``engine.backends.Backend`` with Triton's attention: prompts and mixed steps launch by launch, steps of answers as graphs."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.engine.backends import Backend, Hook, Span
from moonpool.engine.triton.answers import Answers
from moonpool.engine.triton.interpreting import INTERPRETED


class TritonBackend:
    """``whole`` computes any step, with ``triton_step`` in its layers; ``answers``, where given, those that fit it."""

    name = "triton"

    def __init__(self, whole: Backend, answers: Answers | None) -> None:
        self._whole = whole
        self._answers = answers

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        """Steps with hooks go launch by launch: a graph calls nobody between its layers."""
        answers = self._answers
        if answers is not None and before_layer is None and on_layer is None and answers.fit(spans, wanted):
            return answers.forward(ids, spans)
        return self._whole.forward(ids, spans, wanted, before_layer, on_layer)

    def capture_all(self) -> None:
        """Have every graph now, rather than in somebody's first token."""
        if self._answers is not None:
            self._answers.capture_all()

    def close(self) -> None:
        """Graphs first: they hold addresses of what ``whole`` lets go."""
        self._answers = None
        self._whole.close()


def unusable(device: torch.device) -> str | None:
    """Why these kernels do not run on ``device``, and what would help; None where they do."""
    if device.type == "cuda" or INTERPRETED:
        return None
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET was set after triton had been imported; set it before the start"
    return "its kernels need a CUDA device; set TRITON_INTERPRET=1 to have them interpreted on the CPU, slowly, for tests"
