"""The kernels as functions over the pages of an engine: what ``TritonStep`` calls in every layer, and tests and benches too.

All take a ``StepPlan`` and write into what they are given; none waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from moonpool.engine.attention import AttentionCall, LatentCall
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.triton import attending, writing
from moonpool.engine.triton.interpreting import INTERPRETED, launched
from moonpool.engine.triton.plans import StepPlan, Tiles
from moonpool.engine.triton.tiling import (
    CONFIGS,
    TUNED_BY,
    WRITTEN_TOKENS,
    dot_type,
    fitting,
    padded,
    splits_for,
)

_LOG2E = math.log2(math.e)
_MERGED_COLUMNS = 128  # of a program that merges: 64 splits of them are 64 registers of 128 threads

_attend = launched(attending.attend)
if not INTERPRETED:
    _attend = triton.autotune(CONFIGS, TUNED_BY, prune_configs_by={"early_config_prune": fitting}, cache_results=True)(
        attending.attend
    )
_merge_splits = launched(attending.merge)
_write_rows = launched(writing.write)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What both kinds of attention come down to. ``value_columns`` of a row are values, ``rope`` asks for those behind them."""

    query: torch.Tensor  # [heads, tokens, value_columns]
    rope: torch.Tensor | None
    scaling: float
    window: int | None = None
    softcap: float | None = None


def write_kv(memory: PageTensor, plan: StepPlan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """``key`` and ``value`` [kv_heads, tokens, head_dim] of all tokens of the step into layer ``layer`` of their pages."""
    _write(memory, plan, layer, key, value)


def write_latent(memory: PageTensor, plan: StepPlan, layer: int, latent: torch.Tensor) -> None:
    """``latent`` [tokens, head_dim of the layout]."""
    _write(memory, plan, layer, latent[None], None)


def decode_attention(memory: PageTensor, plan: StepPlan, layer: int, call: AttentionCall, out: torch.Tensor) -> None:
    """Fills the tokens of rows of one token in ``out`` [tokens, heads, head_dim], contiguous."""
    tiles = plan.answers(call.query.shape[0] // memory.kv_heads)
    if tiles is not None:
        _run(memory, plan, tiles, layer, _plain(call), out)


def prefill_attention(memory: PageTensor, plan: StepPlan, layer: int, call: AttentionCall, out: torch.Tensor) -> None:
    """Fills the tokens of longer rows. K and V of these tokens are in their pages."""
    heads, _, dim = call.query.shape
    tiles = plan.chunks(heads // memory.kv_heads, dim, call.query.dtype)
    if tiles is not None:
        _run(memory, plan, tiles, layer, _plain(call), out)


def latent_attention(memory: PageTensor, plan: StepPlan, layer: int, call: LatentCall, out: torch.Tensor) -> None:
    """Fills ``out`` [tokens, heads, kv_lora_rank], contiguous: rows of one token and longer ones."""
    heads, _, rank = call.query_latent.shape
    asked = _Asked(_by_columns(call.query_latent), _by_columns(call.query_rope), call.scaling)
    for tiles in (plan.answers(heads), plan.chunks(heads, rank, call.query_latent.dtype)):
        if tiles is not None:
            _run(memory, plan, tiles, layer, asked, out)


def _plain(call: AttentionCall) -> _Asked:
    return _Asked(_by_columns(call.query), None, call.scaling, call.window, call.softcap)


def _by_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(memory: PageTensor, plan: StepPlan, tiles: Tiles, layer: int, asked: _Asked, out: torch.Tensor) -> None:
    layout, query, kv_heads = memory.layout, asked.query, memory.kv_heads
    rope = query if asked.rope is None else asked.rope
    heads, _, values = query.shape
    share, columns = heads // kv_heads, padded(values)
    count = len(tiles.span)
    seen = tiles.longest
    if asked.window is not None:
        seen = asked.window + tiles.tokens if seen is None else min(seen, asked.window + tiles.tokens)
    splits = splits_for(count * kv_heads, seen, plan.tiling)
    units = count * kv_heads * (splits if splits > 1 else 0)
    sums = torch.empty((units, tiles.rows, columns + 1), dtype=torch.float32, device=out.device)
    partials, lses = sums.view(-1)[: units * tiles.rows * columns], sums.view(-1)[units * tiles.rows * columns :]
    scaling, cap = asked.scaling, asked.softcap
    _attend[(kv_heads, count, splits)](
        query,
        rope,
        memory.tensor,
        memory.tensor if memory.exponents is None else memory.exponents,
        out,
        partials if splits > 1 else out,
        lses if splits > 1 else out,
        tiles.span,
        tiles.flat,
        plan.span_first,
        plan.span_count,
        plan.span_end,
        plan.tables,
        layer,
        plan.tables.stride(0),
        splits,
        asked.window or 0,
        query.stride(0),
        query.stride(1),
        rope.stride(0),
        rope.stride(1),
        scaling * _LOG2E if cap is None else scaling / cap,
        0.0 if cap is None else cap * _LOG2E,
        LAYERS=layout.layers,
        KV_HEADS=kv_heads,
        FIRST=memory.first_plane,
        GAP=layout.kv_heads,
        PLANES=layout.planes,
        BLOCK=layout.block_tokens,
        STRIDE=layout.head_dim,
        SHARE=share,
        VALUES=values,
        DIMS=columns,
        ROPE=0 if asked.rope is None else rope.shape[2],
        ROPES=padded(rope.shape[2]),
        WINDOWED=asked.window is not None,
        CAPPED=cap is not None,
        SPLIT=splits > 1,
        KIND=memory.kept,
        DOT=dot_type(query.dtype),
        PRECISION="ieee",
        ROWS=tiles.rows,
        enable_fp_fusion=True,
        **({} if plan.tiling.keys is None else {"KEYS": plan.tiling.keys}),
    )
    if splits > 1:
        _merge(plan, tiles, partials, lses, out, kv_heads, share, splits)


def _merge(
    plan: StepPlan,
    tiles: Tiles,
    partials: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    kv_heads: int,
    share: int,
    splits: int,
) -> None:
    values = out.shape[2]
    columns = min(padded(values), _MERGED_COLUMNS)
    _merge_splits[(len(tiles.span) * kv_heads, tiles.filled, padded(values) // columns)](
        partials,
        lses,
        out,
        tiles.span,
        tiles.flat,
        plan.span_first,
        plan.span_count,
        KV_HEADS=kv_heads,
        SHARE=share,
        VALUES=values,
        DIMS=padded(values),
        ROWS=tiles.rows,
        SPLITS=splits,
        COLUMNS=columns,
        enable_fp_fusion=True,
    )


def _write(memory: PageTensor, plan: StepPlan, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
    layout = memory.layout
    key = _by_columns(key)
    other = key if value is None else _by_columns(value)
    tokens = len(plan.token_span)
    _write_rows[(memory.kv_heads, triton.cdiv(tokens, WRITTEN_TOKENS))](
        key,
        other,
        memory.tensor,
        memory.tensor if memory.exponents is None else memory.exponents,
        plan.token_span,
        plan.positions,
        plan.span_end,
        plan.tables,
        layer,
        plan.tables.stride(0),
        tokens,
        key.stride(0),
        key.stride(1),
        other.stride(0),
        other.stride(1),
        LAYERS=layout.layers,
        FIRST=memory.first_plane,
        GAP=layout.kv_heads,
        PLANES=layout.planes,
        BLOCK=layout.block_tokens,
        WIDTH=layout.head_dim,
        PADDED=padded(layout.head_dim),
        VALUED=value is not None,
        KIND=memory.kept,
        TOKENS=WRITTEN_TOKENS,
        enable_fp_fusion=True,
        num_warps=4,  # one 16-byte load for each thread
    )
