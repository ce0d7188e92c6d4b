"""One step over paged K/V with Triton's kernels: what modules and recipes call in every layer instead of ``TorchStep``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonpool.engine.attention import AttentionCall, LatentCall, Step
from moonpool.engine.backends import Hook, Span
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.triton.calls import (
    decode_attention,
    latent_attention,
    prefill_attention,
    write_kv,
    write_latent,
)
from moonpool.engine.triton.plans import StepPlan


class TritonStep:
    """One forward pass over the spans of ``plan``, which may outlive it."""

    def __init__(self, pages: PageTensor, plan: StepPlan, before_layer: Hook | None, on_layer: Hook | None) -> None:
        self._pages = pages
        self._plan = plan
        self._before_layer = before_layer
        self._on_layer = on_layer

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        pages, plan = self._pages, self._plan
        self._begin(layer)
        write_kv(pages, plan, layer, call.key, call.value)
        self._written(layer)
        heads, tokens, dim = call.query.shape
        out = call.query.new_empty((tokens, heads, dim))
        decode_attention(pages, plan, layer, call, out)
        prefill_attention(pages, plan, layer, call, out)
        return out

    def attend_latent(self, layer: int, call: LatentCall) -> torch.Tensor:
        self._begin(layer)
        write_latent(self._pages, self._plan, layer, call.latent)
        self._written(layer)
        heads, tokens, rank = call.query_latent.shape
        out = call.query_latent.new_empty((tokens, heads, rank))
        latent_attention(self._pages, self._plan, layer, call, out)
        return out

    def _begin(self, layer: int) -> None:
        if self._before_layer is not None:
            self._before_layer(layer)

    def _written(self, layer: int) -> None:
        """The kernel that writes is on its way; who reads pages by another stream waits for an event of this one."""
        if self._on_layer is not None:
            self._on_layer(layer)


def triton_step(pages: PageTensor, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> Step:
    """As ``torch_backend.MakeStep``."""
    return TritonStep(pages, StepPlan.of(spans, pages.tensor.device), before_layer, on_layer)
