"""Attention over K/V in pages. One kernel for prompts and answers, plain K/V and latents; and one that merges splits.

A program has ``ROWS`` queries of one K/V head: the pairs (token, head) of one row of the step whose heads share that K/V head,
counted token by token (``flat = token * SHARE + head``). So all heads of a group go through the same K and V, which are read
once; of an answer's one token its heads fill the tile, of a prompt's chunk as many tokens as fit. With latents all heads
share the one row of each token, which is key and, in its first ``VALUES`` columns, value (``ROPE`` more columns are key only).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moonpool.engine.triton.rows import load_rows, page_rows
from moonpool.engine.triton.softmax import NOTHING, fold, weigh


@triton.jit
def _over_keys(
    best,
    weight,
    total,
    query,
    query_rope,
    pages,
    scales,
    table,
    at,
    begin,
    stop,
    high,
    window,
    layer,
    head,
    inner,
    outer,
    LAYERS: tl.constexpr,
    FIRST: tl.constexpr,
    GAP: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    VALUES: tl.constexpr,
    DIMS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Folds keys [begin, stop) in, tile by tile; not ``MASKED``: whole tiles, all of whose keys every query sees."""
    for first in range(begin, stop, KEYS):
        keys = first + tl.arange(0, KEYS)
        held = keys < high
        rows = page_rows(table, keys, held, layer, FIRST + head, LAYERS, PLANES, BLOCK, MASKED)
        key = load_rows(pages, scales, rows, held, 0, VALUES, DIMS, STRIDE, MASKED, KIND, DOT)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if ROPE > 0:
            rope = load_rows(pages, scales, rows, held, VALUES, ROPE, ROPES, STRIDE, MASKED, KIND, DOT)
            products = tl.dot(query_rope, tl.trans(rope), products, input_precision=PRECISION)
            value = key
        else:
            value = load_rows(pages, scales, rows + GAP * BLOCK, held, 0, VALUES, DIMS, STRIDE, MASKED, KIND, DOT)
        scores = weigh(products, inner, outer, CAPPED)
        if MASKED:
            seen = keys[None, :] <= at[:, None]
            if WINDOWED:
                seen = seen & (keys[None, :] > at[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        best, weight, total = fold(scores, value, best, weight, total, DOT, PRECISION)
    return best, weight, total


@triton.jit(do_not_specialize=["layer", "width", "splits", "window"])
def attend(
    query,  # [heads, tokens, VALUES] by strides, as is query_rope [heads, tokens, ROPE]
    query_rope,
    pages,
    scales,
    out,  # [tokens, heads, VALUES], contiguous
    partials,  # float32 [tiles, KV_HEADS, splits, ROWS, DIMS], where SPLIT
    lses,  # float32 [tiles, KV_HEADS, splits, ROWS]: log2 of the sum of 2**score
    tile_span,  # int32 [tiles]: the row of the step that a tile is of, and its first flat query
    tile_first,
    span_first,  # int32 [spans]: first token in the batch, tokens, and end of the sequence with them
    span_count,
    span_end,
    tables,  # int32 [spans, width]
    layer,
    width,
    splits,
    window,
    query_head,
    query_token,
    rope_head,
    rope_token,
    inner,
    outer,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    FIRST: tl.constexpr,  # plane of K of the first head
    GAP: tl.constexpr,  # planes from K of a head to its V
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    SHARE: tl.constexpr,
    VALUES: tl.constexpr,
    DIMS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid (KV_HEADS, tiles, splits). A split is a range of keys that follows from the length at hand, so that one number of
    splits is right for every length: a captured launch stays valid while sequences grow. A span that ends at 0 is empty."""
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = tl.load(tile_span + tile)
    start = tl.load(tile_first + tile)
    count, end = tl.load(span_count + span), tl.load(span_end + span)
    flat = start + tl.arange(0, ROWS)
    live = flat < count * SHARE
    at = end - count + flat // SHARE  # positions of the queries
    lowest = end - count + start // SHARE
    highest = end - count + tl.minimum((start + ROWS - 1) // SHARE, count - 1)

    columns = tl.arange(0, DIMS)
    token = (tl.load(span_first + span) + flat // SHARE).to(tl.int64)
    query_at = head * SHARE + flat % SHARE
    inside = live[:, None] & (columns < VALUES)[None, :]
    places = query + (query_at * query_head + token * query_token)[:, None] + columns[None, :]
    asked = tl.load(places, mask=inside, other=0.0).to(DOT)
    asked_rope = asked
    if ROPE > 0:
        turned = tl.arange(0, ROPES)
        places = query_rope + (query_at * rope_head + token * rope_token)[:, None] + turned[None, :]
        asked_rope = tl.load(places, mask=live[:, None] & (turned < ROPE)[None, :], other=0.0).to(DOT)

    low = 0
    if WINDOWED:
        low = tl.maximum(0, lowest - window + 1)
    high = highest + 1
    begin, stop = low, high
    if SPLIT:
        each = tl.cdiv(tl.cdiv(high - low, KEYS), splits) * KEYS
        begin = low + split * each
        stop = tl.minimum(begin + each, high)

    best = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIMS], tl.float32)
    table = tables + span * width
    # Tiles between the corners need no mask: [plain, edge). Before them lie keys behind some query's window, after them keys
    # ahead of some query.
    plain = begin
    if WINDOWED:
        plain = begin + tl.cdiv(tl.maximum(highest - window + 1 - begin, 0), KEYS) * KEYS
    edge = begin + tl.maximum(tl.minimum(stop, lowest + 1) - begin, 0) // KEYS * KEYS
    if WINDOWED:
        best, weight, total = _over_keys(
            best, weight, total, asked, asked_rope, pages, scales, table, at, begin, tl.minimum(plain, stop), high, window,
            layer, head, inner, outer, LAYERS, FIRST, GAP, PLANES, BLOCK, STRIDE, VALUES, DIMS, ROPE, ROPES, WINDOWED, CAPPED,
            KIND, DOT, PRECISION, KEYS, True,
        )  # fmt: skip
    best, weight, total = _over_keys(
        best, weight, total, asked, asked_rope, pages, scales, table, at, plain, edge, high, window,
        layer, head, inner, outer, LAYERS, FIRST, GAP, PLANES, BLOCK, STRIDE, VALUES, DIMS, ROPE, ROPES, WINDOWED, CAPPED,
        KIND, DOT, PRECISION, KEYS, False,
    )  # fmt: skip
    best, weight, total = _over_keys(
        best, weight, total, asked, asked_rope, pages, scales, table, at, tl.maximum(plain, edge), stop, high, window,
        layer, head, inner, outer, LAYERS, FIRST, GAP, PLANES, BLOCK, STRIDE, VALUES, DIMS, ROPE, ROPES, WINDOWED, CAPPED,
        KIND, DOT, PRECISION, KEYS, True,
    )  # fmt: skip

    some = tl.where(weight == 0, 1.0, weight)  # a split without keys counts for nothing: its sum stays at 2**NOTHING
    total = total / some[:, None]
    if SPLIT:
        unit = ((tile * KV_HEADS + head) * splits + split).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(lses + unit, best + tl.log2(some))
        tl.store(partials + unit[:, None] * DIMS + columns[None, :], total)
    else:
        places = out + (token * (KV_HEADS * SHARE) + query_at)[:, None] * VALUES + columns[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge(
    partials,
    lses,
    out,
    tile_span,
    tile_first,
    span_first,
    span_count,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    VALUES: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tiles * KV_HEADS, queries of a tile, DIMS / COLUMNS): one query's splits, each weighed by its share of the sum of
    2**score, as in FlashDecoding (Dao et al., 2023)."""
    unit, row = tl.program_id(0), tl.program_id(1)
    tile, head = unit // KV_HEADS, unit % KV_HEADS
    span = tl.load(tile_span + tile)
    flat = tl.load(tile_first + tile) + row
    if flat < tl.load(span_count + span) * SHARE:
        columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        parts = (unit.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)) * ROWS + row
        lse = tl.load(lses + parts)
        share = tl.exp2(lse - tl.max(lse, 0))
        values = tl.load(partials + parts[:, None] * DIMS + columns[None, :])
        total = tl.sum(values * share[:, None], 0) / tl.sum(share, 0)
        token = (tl.load(span_first + span) + flat // SHARE).to(tl.int64)
        place = (token * (KV_HEADS * SHARE) + head * SHARE + flat % SHARE) * VALUES
        tl.store(out + place + columns, total.to(out.dtype.element_ty), mask=columns < VALUES)
