"""Attention of several tokens of one sequence over its pages, by PyTorch's matrix products.

Queries go block by block: then causality is a slice of the keys, and only the corners of the scores need a mask. All query
heads that share a K/V head are rows of one product, so K and V are never repeated. Twice and more as fast as the library's
fused kernel, for scores that are rounded to the dtype of the model, as the models' own code does.

Keys are taken from the pages in groups, so that a long prefix is never copied as a whole; with several groups the results
are merged as they come (the online softmax of FlashAttention, Dao et al., 2022). What a page holds beyond the sequence's
tokens is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moonpool.core.blocks import blocks_for
from moonpool.engine.attention import AttentionCall
from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import PageTensor

QUERY_BLOCK = 128  # queries of one product, times the heads that share K and V
SCORE_BYTES = 16 << 20  # of one block of queries over one group of keys


@dataclass(frozen=True, slots=True)
class _Group:
    """Keys [low, high) of the sequence; ``low`` begins a page."""

    low: int
    high: int
    index: torch.Tensor  # of its pages, for ``PageTensor.gather``


@dataclass(frozen=True, slots=True)
class _Seen:
    """Queries [first, last) over keys [low, high)."""

    first: int
    last: int
    low: int
    high: int


@dataclass(slots=True)
class ChunkRow:
    """One row of a step, of any number of tokens. K and V of its tokens are in their pages before ``attend``."""

    pages: PageTensor
    span: Span
    query_block: int = QUERY_BLOCK
    score_bytes: int = SCORE_BYTES
    _groups: dict[int | None, list[_Group]] = field(default_factory=dict)  # by window; the same for every layer
    _scratch: list[torch.Tensor] = field(default_factory=list)  # scores and weights, flat: fresh memory costs page faults

    def attend(self, layer: int, call: AttentionCall, out: torch.Tensor) -> None:
        """Fills this row's tokens of ``out``, [tokens, heads, head_dim], in the dtype of the query.

        Where ``out`` is narrower than the query, values are the first columns of what pages hold (latents)."""
        groups = self._groups.get(call.window)
        if groups is None:
            groups = self._groups[call.window] = self._plan(call)
            self._provide(call, max(group.high - group.low for group in groups))
        if len(groups) == 1:
            self._attend_at_once(layer, call, groups[0], out)
        else:
            self._merge(layer, call, groups, out)

    def _plan(self, call: AttentionCall) -> list[_Group]:
        span, size = self.span, self.pages.layout.block_tokens
        row_bytes = call.query.shape[0] * min(self.query_block, span.count) * call.query.element_size()
        most = max(1, self.score_bytes // row_bytes // size)  # pages of one group
        low = 0 if call.window is None else max(0, span.start - call.window + 1)
        first, last = low // size, blocks_for(span.end, size)
        return [
            _Group(page * size, min((page + most) * size, span.end), self.pages.page_index(span.table[page : page + most]))
            for page in range(first, last, most)
        ]

    def _provide(self, call: AttentionCall, keys: int) -> None:
        size = call.query.shape[0] * min(self.query_block, self.span.count) * keys
        if not self._scratch or self._scratch[0].numel() < size:
            self._scratch = [call.query.new_empty(size) for _ in range(2)]

    def _blocks(self, call: AttentionCall, group: _Group) -> Sequence[_Seen]:
        """Blocks of queries that see anything of ``group``."""
        span, blocks = self.span, []
        for first in range(span.start, span.end, self.query_block):
            last = min(first + self.query_block, span.end)
            low = group.low if call.window is None else max(group.low, first - call.window + 1)
            if low < min(last, group.high):
                blocks.append(_Seen(first, last, low, min(last, group.high)))
        return blocks

    def _scores(self, call: AttentionCall, seen: _Seen, keys: torch.Tensor) -> torch.Tensor:
        """[kv_heads, rows, keys], -inf where a query does not see a key. Overwritten by the next call."""
        query = call.query[:, self._at(seen)].reshape(self.pages.kv_heads, -1, call.query.shape[2])
        shape = (query.shape[0], query.shape[1], keys.shape[1])
        scores = self._scratch[0][: math.prod(shape)].view(shape)
        torch.baddbmm(query.new_empty(1), query, keys.transpose(1, 2), beta=0, alpha=call.scaling, out=scores)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        _hide(scores.view(query.shape[0], -1, seen.last - seen.first, keys.shape[1]), seen, call.window)
        return scores

    def _put(self, out: torch.Tensor, seen: _Seen, rows: torch.Tensor) -> None:
        out[self._at(seen)] = rows.view(out.shape[1], -1, out.shape[2]).transpose(0, 1)

    def _at(self, seen: _Seen) -> slice:
        """The queries' places among the tokens of the step."""
        shift = self.span.first - self.span.start
        return slice(seen.first + shift, seen.last + shift)

    def _attend_at_once(self, layer: int, call: AttentionCall, group: _Group, out: torch.Tensor) -> None:
        keys, values = self.pages.gather(group.index, layer)
        for seen in self._blocks(call, group):
            key, value = _cut(keys, values[..., : out.shape[2]], group, seen)
            scores = self._scores(call, seen, key)
            weights = self._scratch[1][: scores.numel()].view(scores.shape)
            torch.softmax(scores, dim=2, out=weights)
            self._put(out, seen, torch.bmm(weights, value))

    def _merge(self, layer: int, call: AttentionCall, groups: Sequence[_Group], out: torch.Tensor) -> None:
        kv_heads, dim = self.pages.kv_heads, out.shape[2]
        sums: dict[int, _Sums] = {}  # by a block's first query
        for group in groups:
            keys, values = self.pages.gather(group.index, layer)
            for seen in self._blocks(call, group):
                rows = call.query.shape[0] // kv_heads * (seen.last - seen.first)
                sums.setdefault(seen.first, _Sums(kv_heads, rows, dim, out.device))
                key, value = _cut(keys, values[..., :dim], group, seen)
                sums[seen.first].add(self._scores(call, seen, key).float(), value)
                if seen.high == seen.last:  # the last of its keys
                    self._put(out, seen, sums.pop(seen.first).result(out.dtype))


class _Sums:
    """Weighted values so far, in float32 and relative to the best score so far."""

    def __init__(self, kv_heads: int, rows: int, dim: int, device: torch.device) -> None:
        self._best = torch.full((kv_heads, rows, 1), torch.finfo(torch.float32).min, device=device)
        self._weight = torch.zeros((kv_heads, rows, 1), device=device)
        self._value = torch.zeros((kv_heads, rows, dim), device=device)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        best = torch.maximum(self._best, scores.amax(dim=2, keepdim=True))
        scores.sub_(best).exp_()
        shrink = (self._best - best).exp_()
        self._weight.mul_(shrink).add_(scores.sum(dim=2, keepdim=True))
        self._value.mul_(shrink).add_(torch.bmm(scores.to(values.dtype), values))
        self._best = best

    def result(self, dtype: torch.dtype) -> torch.Tensor:
        return (self._value / self._weight).to(dtype)


def _cut(keys: torch.Tensor, values: torch.Tensor, group: _Group, seen: _Seen) -> tuple[torch.Tensor, torch.Tensor]:
    here = slice(seen.low - group.low, seen.high - group.low)
    return keys[:, here], values[:, here]


def _hide(scores: torch.Tensor, seen: _Seen, window: int | None) -> None:
    """Set to -inf what lies ahead of a query or behind its window, in ``scores`` [..., queries, keys]."""
    device = scores.device
    queries = torch.arange(seen.first, seen.last, device=device)[:, None]
    if seen.high > seen.first + 1:
        ahead = max(seen.low, seen.first)
        hidden = torch.arange(ahead, seen.high, device=device) > queries
        scores[..., ahead - seen.low :].masked_fill_(hidden, -torch.inf)
    if window is not None and seen.last - window > seen.low:
        behind = min(seen.last - window, seen.high)
        hidden = torch.arange(seen.low, behind, device=device) <= queries - window
        scores[..., : behind - seen.low].masked_fill_(hidden, -torch.inf)
