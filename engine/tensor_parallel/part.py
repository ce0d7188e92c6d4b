"""One rank's part of a model: some heads of every layer, and the K/V of these heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.engine.device import staged_view
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.host_view import StagedView
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.paged_kernels import compiled_attention
from moonpool.engine.recipe import Recipe
from moonpool.engine.tensor_parallel.keeping import Keeping
from moonpool.engine.tensor_parallel.line import Step
from moonpool.engine.tensor_parallel.meeting import Meeting
from moonpool.engine.torch_backend import MakeStep, TorchStep


class Part:
    """``view``: of pages of its own heads, over the host's view of all; None: its pages are those that all ranks share."""

    def __init__(
        self, recipe: Recipe, memory: PageTensor, view: StagedView | None, meeting: Meeting, make_step: MakeStep
    ) -> None:
        """``recipe`` is this rank's share, on the device of ``memory``."""
        self.view = view
        self._device = memory.device
        self._meeting = meeting
        self._backend = FusedBackend(recipe, memory, make_step, reduce=meeting.sum)

    def embedded(self, ids: NDArray[np.int64]) -> torch.Tensor:
        return self._backend.embedded(ids)

    def through_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[tokens, hidden] behind the last layer; then what the step sends is in the host's view, of all ranks."""
        x = x.to(self._device)
        if self.view is None:
            x = self._backend.through_layers(x, step.spans, None, None)
        else:
            brought, sent = _nothing if step.brings else None, _nothing if step.sends else None
            with self.view.step(step.spans, brought, sent) as (before, on):
                x = self._backend.through_layers(x, step.spans, before, on)
        self._meeting.end_layers()
        return x

    def logits(self, x: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        return self._backend.logits(x, wanted)

    def close(self) -> None:
        self._backend.close()
        del self.view, self._backend, self._meeting


def part_of(
    recipe: Recipe, keeping: Keeping, rank: int, layout: KVLayout, shared: torch.Tensor, heads: range, meeting: Meeting
) -> Part:
    """``layout``: of all heads; ``shared``: uint8, canonical pages that every rank maps; ``heads``: this rank's K/V heads."""
    pages = shared.numel() // layout.block_bytes
    if keeping.attention == "torch" and keeping.kind == "cpu":
        compiled_attention(layout.dtype)
    if not keeping.apart:
        memory, view = PageTensor(layout, pages, memory=shared, heads=heads), None
    else:
        with torch.inference_mode(False):  # others than the thread that computes write there, too
            own = replace(layout, kv_heads=len(heads))
            memory = PageTensor(own, pages, device=keeping.device_of(rank), kept=keeping.kept)
            view = staged_view(memory, shared.view(pages, layout.layers, layout.slice_bytes), heads)
    return Part(recipe, memory, view, meeting, _make_step(keeping))


def _make_step(keeping: Keeping) -> MakeStep:
    if keeping.attention == "torch":
        return TorchStep
    from moonpool.engine.triton.step import triton_step  # said so late: it takes a second to load, and is for Linux only

    return triton_step


def _nothing(layer: int) -> None:
    """Hooks are rank 0's; the meeting runs them."""
