"""One step over paged K/V with PyTorch: what modules and recipes call in every layer.

Rows of one token (decode) are for the kernels of ``paged_attention``; longer rows (prompts) for ``chunk_attention``, and so
is whatever attends to latents, or to pages of a GPU: there this is a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moonpool.core.layout import MLA
from moonpool.engine.attention import AttentionCall, LatentCall, Step
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
        self._stride = pages.layout.planes * pages.layout.block_tokens
        chunked = pages.layout.kind == MLA or pages.device.type != "cpu"
        self._chunks = [ChunkRow(pages, span) for span in spans if chunked or span.count > 1]
        singles = [span for span in spans if not chunked and span.count == 1]
        self._decode = DecodeRows(pages.layout, pages.own, singles) if singles else None

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        self._keep(layer, torch.cat((call.key, call.value)).view(-1, self._pages.layout.head_dim))
        heads, tokens, dim = call.query.shape
        out = call.query.new_empty((tokens, heads, dim))
        if self._decode is not None:
            self._decode.attend(layer, call, out)
        for chunk in self._chunks:
            chunk.attend(layer, call, out)
        return out

    def attend_latent(self, layer: int, call: LatentCall) -> torch.Tensor:
        """As plain attention with one K/V head, whose keys are whole rows and whose values are the latents in them."""
        self._keep(layer, call.latent)
        rows = call.latent[None]
        as_plain = AttentionCall(
            query=torch.cat((call.query_latent, call.query_rope), dim=2),
            key=rows,
            value=rows[..., : call.query_latent.shape[2]],
            scaling=call.scaling,
            window=None,
            softcap=None,
            causal=True,
            extra=(),
        )
        heads, tokens, rank = call.query_latent.shape
        out = call.query_latent.new_empty((tokens, heads, rank))
        for chunk in self._chunks:
            chunk.attend(layer, as_plain, out)
        return out

    def _keep(self, layer: int, fresh: torch.Tensor) -> None:
        """Write rows into pages, between the hooks."""
        if self._before_layer is not None:
            self._before_layer(layer)
        self._pages.rows.index_copy_(0, self._write + layer * self._stride, fresh)
        if self._on_layer is not None:
            self._on_layer(layer)
