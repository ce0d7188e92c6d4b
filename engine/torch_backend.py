"""Reference attention over paged K/V with plain PyTorch.

Rows of one token (decode) are for the kernels of ``paged_attention``; longer rows (prefill chunks) attend to their own
K/V, which are at hand, and to the gathered prefix, and the two results are merged by their log-sum-exp (as in
FlashAttention, Dao et al., 2022). Chunks of layers with a window or a soft cap take the plain path ``_attend_blocks``.

Nothing outside a row's tokens reaches a result: what a gathered page holds beyond them may be anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.blocks import blocks_for
from moonpool.core.layout import KVLayout
from moonpool.engine.attention import AttentionCall
from moonpool.engine.backends import Hook, Span
from moonpool.engine.paged_attention import DecodeRows

QUERY_BLOCK = 128  # queries per block on the plain path
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PageTensor:
    """``[pages, layers, 2, kv_heads, block_tokens, head_dim]``."""

    def __init__(self, layout: KVLayout, pages: int) -> None:
        self.layout = layout
        self.pages = pages
        shape = (pages, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
        self.tensor = torch.zeros(shape, dtype=getattr(torch, layout.dtype))
        self.rows = self.tensor.view(-1, layout.head_dim)  # one token of one head
        self.planes = self.tensor.view(-1, layout.block_tokens * layout.head_dim)  # K or V of one head of one page
        self.plane_ids = torch.arange(2 * layout.kv_heads)
        self.page_planes = layout.layers * 2 * layout.kv_heads

    def slot_rows(self, spans: Sequence[Span]) -> torch.Tensor:
        """int64 [2 * kv_heads * tokens]: where layer 0's K and V of all tokens go, in ``rows``, heads before tokens."""
        size = self.layout.block_tokens
        places = []
        for span in spans:
            at = np.arange(span.start, span.end)
            places.append(span.table[at // size] * (self.page_planes * size) + at % size)
        tokens = torch.from_numpy(np.concatenate(places))
        return (self.plane_ids[:, None] * size + tokens).view(-1)

    def page_index(self, tables: NDArray[np.int64]) -> torch.Tensor:
        """int64 [2 * batch * kv_heads * n]: the planes of layer 0 that ``tables`` [batch, n] name, for ``gather``."""
        base = torch.from_numpy(tables)[None, :, None, :] * self.page_planes
        return (base + self.plane_ids.view(2, 1, -1, 1)).view(-1)

    def gather(self, index: torch.Tensor, layer: int, batch: int) -> torch.Tensor:
        """[2, batch, kv_heads, n * block_tokens, head_dim], a copy."""
        heads = self.layout.kv_heads
        return self.planes.index_select(0, index + layer * 2 * heads).view(2, batch, heads, -1, self.layout.head_dim)


class TorchStep:
    """One forward pass over ``spans``: what ``engine.attention`` calls in every layer."""

    def __init__(self, pages: PageTensor, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None) -> None:
        self._pages = pages
        self._spans = spans
        self._before_layer = before_layer
        self._on_layer = on_layer
        self._write = pages.slot_rows(spans)
        self._stride = 2 * pages.layout.kv_heads * pages.layout.block_tokens
        self._chunks = [span for span in spans if span.count > 1]
        singles = [span for span in spans if span.count == 1]
        self._decode = DecodeRows(pages.layout, pages.tensor, singles) if singles else None
        self._prefixes: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        if self._before_layer is not None:
            self._before_layer(layer)
        pages = self._pages
        fresh = torch.cat((call.key, call.value)).view(-1, pages.layout.head_dim)
        pages.rows.index_copy_(0, self._write + layer * self._stride, fresh)
        if self._on_layer is not None:
            self._on_layer(layer)
        if len(self._spans) == 1 and self._decode is None:
            return self._attend_chunk(layer, call, self._spans[0])
        heads, tokens, dim = call.query.shape
        out = call.query.new_empty((tokens, heads, dim))
        if self._decode is not None:
            self._decode.attend(layer, call, out)
        for span in self._chunks:
            out[span.first : span.first + span.count] = self._attend_chunk(layer, call, span)
        return out

    def _attend_chunk(self, layer: int, call: AttentionCall, span: Span) -> torch.Tensor:
        """[count, heads, head_dim] of a row of several tokens."""
        if call.softcap is not None or (call.window is not None and span.end > call.window):
            return self._attend_blocks(layer, call, span)
        kv_heads = self._pages.layout.kv_heads
        here = slice(span.first, span.first + span.count)
        query = call.query[:, here]
        heads, count, dim = query.shape
        share = heads // kv_heads
        own, own_lse = _FLASH(
            query.reshape(kv_heads, share, count, dim),
            call.key[:, None, here].expand(-1, share, -1, -1),
            call.value[:, None, here].expand(-1, share, -1, -1),
            is_causal=True,
            scale=call.scaling,
        )
        if span.start:
            kv = self._prefix(layer, span)
            old, old_lse = _FLASH(query.reshape(kv_heads, 1, share * count, dim), kv[0], kv[1], scale=call.scaling)
            weight = torch.sigmoid(old_lse.view(kv_heads, share, count) - own_lse.view(kv_heads, share, count))
            own = torch.lerp(own.float(), old.view(own.shape).float(), weight[..., None]).to(query.dtype)
        out: torch.Tensor = own.reshape(heads, count, dim).transpose(0, 1)
        return out

    def _prefix(self, layer: int, span: Span) -> torch.Tensor:
        """[2, kv_heads, 1, start, head_dim]: K and V before the chunk."""
        index = self._prefixes.get(span.first)
        if index is None:
            index = self._pages.page_index(span.table[None, : blocks_for(span.start, self._pages.layout.block_tokens)])
            self._prefixes[span.first] = index
        return self._pages.gather(index, layer, 1)[:, 0, :, None, : span.start]

    def _attend_blocks(self, layer: int, call: AttentionCall, span: Span) -> torch.Tensor:
        """[count, heads, head_dim], block of queries by block of queries: windows and soft caps."""
        size = self._pages.layout.block_tokens
        window = call.window if call.window is not None else span.end
        kv_heads = self._pages.layout.kv_heads
        heads, _, dim = call.query.shape
        out = call.query.new_empty((span.count, heads, dim))
        for start in range(span.start, span.end, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, span.end)
            low = max(0, start - window + 1)
            skip = low // size
            index = self._pages.page_index(span.table[None, skip : blocks_for(end, size)])
            kv = self._pages.gather(index, layer, 1)[:, 0, :, None, low - skip * size : end - skip * size]
            at = span.first + start - span.start
            query = call.query[:, at : at + end - start].reshape(kv_heads, heads // kv_heads, end - start, dim)
            queries, keys = torch.arange(start, end)[:, None], torch.arange(low, end)
            seen = (keys <= queries) & (keys > queries - window)
            part = _plain(query, kv[0], kv[1], seen, call)
            out[at - span.first : at - span.first + end - start] = part.reshape(heads, end - start, dim).transpose(0, 1)
        return out


def _plain(
    query: torch.Tensor,  # [kv_heads, share, queries, head_dim]
    key: torch.Tensor,  # [kv_heads, 1, keys, head_dim]
    value: torch.Tensor,
    seen: torch.Tensor,  # bool [queries, keys]
    call: AttentionCall,
) -> torch.Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
