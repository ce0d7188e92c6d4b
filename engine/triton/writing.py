"""Fresh K and V, or latents, of all tokens of a step into pages, by their positions and page tables."""

from __future__ import annotations

import triton
import triton.language as tl

from moonpool.engine.triton.rows import page_rows, store_rows


@triton.jit
def _put(
    fresh,
    pages,
    scales,
    rows,
    at,
    live,
    head,
    by_head,
    by_token,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
):
    columns = tl.arange(0, PADDED)
    places = fresh + (head * by_head + at.to(tl.int64) * by_token)[:, None] + columns[None, :]
    tile = tl.load(places, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)
    store_rows(pages, scales, rows, live, tile, WIDTH, PADDED, WIDTH, KIND)


@triton.jit(do_not_specialize=["layer", "width", "tokens"])
def write(
    key,  # [K/V heads, tokens, WIDTH] by strides; latents are one head
    value,  # the same, where VALUED
    pages,
    scales,
    token_span,  # int32 [tokens]
    positions,
    span_end,  # int32 [spans]
    tables,  # int32 [spans, width]
    layer,
    width,
    tokens,
    key_head,
    key_token,
    value_head,
    value_token,
    LAYERS: tl.constexpr,
    FIRST: tl.constexpr,
    GAP: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    VALUED: tl.constexpr,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (K/V heads, tokens / TOKENS). A token at or beyond its sequence's end is padding, and not written."""
    head = tl.program_id(0)
    at = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live = at < tokens
    span = tl.load(token_span + at, mask=live, other=0)
    position = tl.load(positions + at, mask=live, other=0)
    live = live & (position < tl.load(span_end + span, mask=live, other=0))
    rows = page_rows(tables + span * width, position, live, layer, FIRST + head, LAYERS, PLANES, BLOCK, True)
    _put(key, pages, scales, rows, at, live, head, key_head, key_token, WIDTH, PADDED, KIND)
    if VALUED:
        there = rows + GAP * BLOCK
        _put(value, pages, scales, there, at, live, head, value_head, value_token, WIDTH, PADDED, KIND)
