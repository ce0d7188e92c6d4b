"""The model as its library wrote it, with our attention function in every layer: serves whatever the engine accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import KV
from moonpool.engine.backends import Hook, Span
from moonpool.engine.page_tensor import PageTensor, sent
from moonpool.engine.paged_kernels import compiled_attention
from moonpool.engine.torch_backend import MakeStep, TorchStep


class ModuleBackend:
    name = "torch"

    def __init__(self, model: torch.nn.Module, memory: PageTensor, make_step: MakeStep = TorchStep) -> None:
        if make_step is TorchStep and memory.layout.kind == KV and memory.device.type == "cpu":
            compiled_attention(memory.layout.dtype)  # takes seconds the first time on a machine: not in somebody's first token
        self._model = model
        self._memory = memory
        self._make_step = make_step

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        out = self._model(
            input_ids=sent(ids, self._memory.device)[None],
            position_ids=sent(positions, self._memory.device)[None],
            use_cache=False,
            logits_to_keep=sent(np.array(wanted, dtype=np.int64), self._memory.device),
            moonpool_step=self._make_step(self._memory, spans, before_layer, on_layer),
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def close(self) -> None:
        del self._model, self._memory
