"""What a block of keys adds to rows of queries: packed, scored, masked, softened to weights, and its values weighed."""

from __future__ import annotations

import numpy as np
from numba import njit

from moonpool.engine.compiled import matrix, places, tiles, vectors
from moonpool.engine.compiled.lanes import INLINE, exp2_of, real, set_real, word
from moonpool.engine.compiled.matrix import HAS_MATRIX_UNIT
from moonpool.engine.compiled.places import KEY_BLOCK

AHEAD = 64  # keys: how far those that come from memory are asked for in advance
UNSEEN = np.float32(-(2.0**99))  # a power of two, times which any number is exact
MATRIX_ROWS = 32  # rows that the matrix unit takes at once: their scores and weights stay in the L1 cache

_scores_12, _scores_6, _scores_4, _scores_3, _scores_2, _scores_1 = (tiles.scores(r, 2) for r in (12, 6, 4, 3, 2, 1))
_weighted_6, _weighted_4, _weighted_3, _weighted_2, _weighted_1 = (tiles.weighted(r, 4) for r in (6, 4, 3, 2, 1))
_highest_4, _highest_1 = vectors.highest(4), vectors.highest(1)
_weights_4, _weights_1 = vectors.weights(4), vectors.weights(1)
_half_6, _half_3, _half_1 = (tiles.weighted(r, 2) for r in (6, 3, 1))
_matrix_scores_2, _matrix_scores_1 = matrix.scores(2), matrix.scores(1)
_matrix_weighted_2, _matrix_weighted_1 = matrix.weighted(2), matrix.weighted(1)


@njit(**INLINE)
def _tile_at(model, layer, head, table, at):
    """Where the keys of the tile at position ``at`` lie; its values: ``kv_heads`` planes behind."""
    page = word(table + 8 * (at // model.block_tokens))
    keys = model.pages + page * model.page_bytes + layer * model.layer_bytes + head * model.plane_bytes
    return keys + (at % model.block_tokens) * model.head_dim * 2


@njit(**INLINE)
def ask_for(model, layer, head, table, at):
    keys, lines = _tile_at(model, layer, head, table, at), tiles.TILE_KEYS * model.head_dim // 32
    tiles.ask_for(keys, lines)
    tiles.ask_for(keys + model.kv_heads * model.plane_bytes, lines)


@njit(**INLINE)
def pack(model, layer, head, table, begin, end, last, scratch):
    """Keys and values [begin, end) of a block into scratch; returns how many tiles. Values of the last tile end with zeros.

    ``last``: where the keys of the task end.
    """
    dim = model.head_dim
    count = (end - begin + tiles.TILE_KEYS - 1) // tiles.TILE_KEYS
    for tile in range(count):
        at = begin + tile * tiles.TILE_KEYS
        if at + AHEAD < last:
            ask_for(model, layer, head, table, at + AHEAD)
        keys = _tile_at(model, layer, head, table, at)
        values = keys + model.kv_heads * model.plane_bytes
        tiles.transpose_keys(keys, dim, places.keys(scratch, dim) + tile * tiles.TILE_KEYS * dim * 2)
        held = min(end - at, tiles.TILE_KEYS)
        if held < tiles.TILE_KEYS:  # what lies behind the last token may be anything, NaN included
            tail = places.tail(scratch, dim)
            vectors.copy(values, held * dim // 32, tail)
            vectors.zero(tail + held * dim * 2, (tiles.TILE_KEYS - held) * dim // 32)
            values = tail
        tiles.interleave_values(values, dim, places.values(scratch, dim) + tile * tiles.TILE_KEYS * dim * 2)
    return count


@njit(**INLINE)
def _score(scratch, dim, first, last, count):
    """Scores of rows [first, last) with ``count`` tiles of keys, by two: a last odd one brings a stale neighbour along."""
    queries, keys, stride = places.queries(scratch), places.keys(scratch, dim), 4 * KEY_BLOCK
    for tile in range(0, count, 2):
        key, out, row = keys + tile * tiles.TILE_KEYS * dim * 2, scratch + tile * 64, first
        while row < last:
            query, here, left = queries + row * dim * 2, out + (row - first) * stride, last - row
            if left >= 12:
                _scores_12(query, key, dim, here, stride)
                row += 12
            elif left >= 6:
                _scores_6(query, key, dim, here, stride)
                row += 6
            elif left >= 4:
                _scores_4(query, key, dim, here, stride)
                row += 4
            elif left >= 3:
                _scores_3(query, key, dim, here, stride)
                row += 3
            elif left >= 2:
                _scores_2(query, key, dim, here, stride)
                row += 2
            else:
                _scores_1(query, key, dim, here, stride)
                row += 1


@njit(**INLINE)
def _mask(scratch, first, last, group, position, begin, count, window):
    """Take from each row the keys behind its query, and those before its window. Keys of the block begin at ``begin``."""
    columns = count * tiles.TILE_KEYS
    for row in range(first, last):
        own = position + row // group - begin  # the query's own key, as a column
        line = scratch + (row - first) * 4 * KEY_BLOCK
        for column in range(max(own + 1, 0), columns):
            set_real(line + 4 * column, UNSEEN)
        if window:
            for column in range(min(own + 1 - window, columns)):
                set_real(line + 4 * column, UNSEEN)


@njit(**INLINE)
def _soften(model, scratch, dim, first, last, count):
    """Scores to weights; what was summed so far is rescaled where a row's maximum rose."""
    scale, stride, row = model.score_scale, 4 * KEY_BLOCK, first
    tops = scratch + 4 * places.BLOCK_HIGHEST
    while row < last:
        line = scratch + (row - first) * stride
        if last - row >= 4:
            _highest_4(line, stride, count, tops + 4 * row)
            row += 4
        else:
            _highest_1(line, stride, count, tops + 4 * row)
            row += 1
    for r in range(first, last):
        high, total = scratch + 4 * (places.HIGHEST + r), scratch + 4 * (places.TOTAL + r)
        old, top = real(high), real(tops + 4 * r)
        if top > old:
            shrink = exp2_of((old - top) * scale)
            set_real(high, top)
            set_real(total, real(total) * shrink)
            vectors.scale(places.sums(scratch, dim) + r * dim * 4, dim // 16, shrink)
    row = first
    while row < last:
        line, out = scratch + (row - first) * stride, scratch + 4 * places.WEIGHTS + (row - first) * 2 * KEY_BLOCK
        high, total = scratch + 4 * (places.HIGHEST + row), scratch + 4 * (places.TOTAL + row)
        if last - row >= 4:
            _weights_4(line, stride, count, high, scale, out, 2 * KEY_BLOCK, total)
            row += 4
        else:
            _weights_1(line, stride, count, high, scale, out, 2 * KEY_BLOCK, total)
            row += 1


@njit(**INLINE)
def _weigh(scratch, dim, first, last, count):
    """Add the weighted values to rows [first, last), 64 columns at a time."""
    pairs, stride = count * tiles.TILE_KEYS // 2, 2 * KEY_BLOCK
    for column in range(0, dim - dim % 64, 64):
        value, row = places.values(scratch, dim) + column * 4, first
        while row < last:
            weight, out, left = (
                scratch + 4 * places.WEIGHTS + (row - first) * stride,
                places.sums(scratch, dim) + (row * dim + column) * 4,
                last - row,
            )
            if left >= 6:
                _weighted_6(weight, stride, value, dim * 4, pairs, out, dim * 4)
                row += 6
            elif left >= 4:
                _weighted_4(weight, stride, value, dim * 4, pairs, out, dim * 4)
                row += 4
            elif left >= 3:
                _weighted_3(weight, stride, value, dim * 4, pairs, out, dim * 4)
                row += 3
            elif left >= 2:
                _weighted_2(weight, stride, value, dim * 4, pairs, out, dim * 4)
                row += 2
            else:
                _weighted_1(weight, stride, value, dim * 4, pairs, out, dim * 4)
                row += 1
    if dim % 64:
        _weigh_half(scratch, dim, first, last, pairs, stride)


@njit(**INLINE)
def _weigh_half(scratch, dim, first, last, pairs, stride):
    """The last 32 columns of a head whose size is no multiple of 64."""
    value, row = places.values(scratch, dim) + (dim - 32) * 4, first
    while row < last:
        weight, out = (
            scratch + 4 * places.WEIGHTS + (row - first) * stride,
            places.sums(scratch, dim) + (row * dim + dim - 32) * 4,
        )
        left = last - row
        if left >= 6:
            _half_6(weight, stride, value, dim * 4, pairs, out, dim * 4)
            row += 6
        elif left >= 3:
            _half_3(weight, stride, value, dim * 4, pairs, out, dim * 4)
            row += 3
        else:
            _half_1(weight, stride, value, dim * 4, pairs, out, dim * 4)
            row += 1


@njit(**INLINE)
def _matrix_score(scratch, dim, first, last, count):
    """``_score`` of up to 32 rows; what lies behind the last one is scored, too."""
    query, keys, stride = places.queries(scratch) + first * dim * 2, places.keys(scratch, dim), 4 * KEY_BLOCK
    for tile in range(0, count, 2):
        key, out = keys + tile * tiles.TILE_KEYS * dim * 2, scratch + tile * 64
        if last - first > matrix.TILE_ROWS:
            _matrix_scores_2(query, key, dim, out, stride)
        else:
            _matrix_scores_1(query, key, dim, out, stride)


@njit(**INLINE)
def _even(scratch, dim, rows, count):
    """The matrix unit weighs keys by 32: a missing last tile is one of values that are zero, and that no row sees."""
    if count % 2:
        size = tiles.TILE_KEYS * dim * 2
        vectors.zero(places.values(scratch, dim) + count * size, size // 64)
        for row in range(rows):
            vectors.fill(scratch + (row * KEY_BLOCK + count * tiles.TILE_KEYS) * 4, 1, UNSEEN)
    return count + count % 2


@njit(**INLINE)
def _matrix_weigh(scratch, dim, first, last, count):
    """``_weigh`` of up to 32 rows, 32 columns at a time; ``count`` is even."""
    weight, turns, stride = scratch + 4 * places.WEIGHTS, count // 2, 2 * KEY_BLOCK
    for column in range(0, dim, 32):
        value, out = places.values(scratch, dim) + column * 4, places.sums(scratch, dim) + (first * dim + column) * 4
        if last - first > matrix.TILE_ROWS:
            _matrix_weighted_2(weight, stride, value, dim * 4, turns, out, dim * 4)
        else:
            _matrix_weighted_1(weight, stride, value, dim * 4, turns, out, dim * 4)


@njit(**INLINE)
def _score_with_any(in_matrix, scratch, dim, first, last, count):
    if HAS_MATRIX_UNIT and in_matrix:
        _matrix_score(scratch, dim, first, last, count)
        return
    _score(scratch, dim, first, last, count)


@njit(**INLINE)
def _weigh_with_any(in_matrix, scratch, dim, first, last, count):
    if HAS_MATRIX_UNIT and in_matrix:
        _matrix_weigh(scratch, dim, first, last, count)
        return
    _weigh(scratch, dim, first, last, count)


@njit(**INLINE)
def add_block(model, in_matrix, task, window, first, last, begin, count, masks, scratch):
    """What the keys from ``begin`` on, in ``count`` tiles, add to rows [first, last)."""
    dim = model.head_dim
    _score_with_any(in_matrix, scratch, dim, first, last, count)
    if model.softcap > 0:
        for row in range(last - first):
            vectors.cap(scratch + row * 4 * KEY_BLOCK, count, model.scaling, model.softcap)
    if masks:
        _mask(scratch, first, last, model.heads // model.kv_heads, task.position, begin, count, window)
    if in_matrix:
        count = _even(scratch, dim, last - first, count)
    _soften(model, scratch, dim, first, last, count)
    _weigh_with_any(in_matrix, scratch, dim, first, last, count)
