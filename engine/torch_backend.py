"""One step over paged K/V with PyTorch: what modules and recipes call in every layer.

Rows of one token (decode) are for the kernels of ``paged_attention``; longer rows (prompts) for ``chunk_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moonpool.engine.attention import AttentionCall, Step
from moonpool.engine.backends import Hook, Span
from moonpool.engine.chunk_attention import ChunkRow
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.paged_attention import DecodeRows

MakeStep = Callable[[PageTensor, Sequence[Span], Hook | None, Hook | None], Step]
"""``TorchStep``, or another that takes its place: attention and K/V writes of all layers of one step."""


class TorchStep:
    """One forward pass over ``spans``: what ``engine.attention`` calls in every layer."""

    def __init__(self, pages: PageTensor, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> None:
        self._pages = pages
        self._before_layer = before_layer
        self._on_layer = on_layer
        self._write = pages.slot_rows(spans)
        self._stride = 2 * pages.layout.kv_heads * pages.layout.block_tokens
        self._chunks = [ChunkRow(pages, span) for span in spans if span.count > 1]
        singles = [span for span in spans if span.count == 1]
        self._decode = DecodeRows(pages.layout, pages.tensor, singles) if singles else None

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        if self._before_layer is not None:
            self._before_layer(layer)
        pages = self._pages
        fresh = torch.cat((call.key, call.value)).view(-1, pages.layout.head_dim)
        pages.rows.index_copy_(0, self._write + layer * self._stride, fresh)
        if self._on_layer is not None:
            self._on_layer(layer)
        heads, tokens, dim = call.query.shape
        out = call.query.new_empty((tokens, heads, dim))
        if self._decode is not None:
            self._decode.attend(layer, call, out)
        for chunk in self._chunks:
            chunk.attend(layer, call, out)
        return out
