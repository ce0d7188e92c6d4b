"""Queries of one K/V head against pages: an online softmax (FlashAttention, Dao et al., 2022) whose bits never vary.

Keys come in blocks of KEY_BLOCK from position 0 on; blocks form ranges of KEY_RANGE. Within a range a running maximum
rescales what came before; ranges are merged in order by the same formula, whether one task computed them all or several did.
A key that a query may not see weighs exactly 0, so what else a block holds changes nothing.

Rows of scratch are (query, query head of the group), query by query.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moonpool.engine.compiled import matrix, tiles, vectors
from moonpool.engine.compiled.features import QUERY_ROWS
from moonpool.engine.compiled.lanes import FLAGS, INLINE, byte, exp2_of, real, set_real, word
from moonpool.engine.compiled.matrix import HAS_MATRIX_UNIT

KEY_BLOCK = 128
KEY_RANGE = 512
_AHEAD = 64  # keys: how far those that come from memory are asked for in advance
_UNSEEN = np.float32(-1e30)

_scores_12, _scores_6, _scores_4, _scores_3, _scores_2, _scores_1 = (tiles.scores(r, 2) for r in (12, 6, 4, 3, 2, 1))
_weighted_6, _weighted_4, _weighted_3, _weighted_2, _weighted_1 = (tiles.weighted(r, 4) for r in (6, 4, 3, 2, 1))
_highest_4, _highest_1 = vectors.highest(4), vectors.highest(1)
_weights_4, _weights_1 = vectors.weights(4), vectors.weights(1)
_half_6, _half_3, _half_1 = (tiles.weighted(r, 2) for r in (6, 3, 1))
_matrix_scores_2, _matrix_scores_1 = matrix.scores(2), matrix.scores(1)
_matrix_weighted_2, _matrix_weighted_1 = matrix.weighted(2), matrix.weighted(1)


def scratch_bytes(head_dim: int) -> int:
    """Of one thread; in the order of the functions below."""
    return _END * 4 + QUERY_ROWS * head_dim * (2 + 4 + 4) + KEY_BLOCK * head_dim * 4 + tiles.TILE_KEYS * head_dim * 2 + 64


# Offsets in float32 that do not depend on the head's size.
_SCORES = 0  # float32 [QUERY_ROWS, KEY_BLOCK]
_WEIGHTS = _SCORES + QUERY_ROWS * KEY_BLOCK  # bf16 [QUERY_ROWS, KEY_BLOCK]
_HIGHEST = _WEIGHTS + QUERY_ROWS * KEY_BLOCK // 2  # float32 [QUERY_ROWS], of a range
_TOTAL = _HIGHEST + QUERY_ROWS  # float32 [QUERY_ROWS], of a range
_ALL_HIGHEST = _TOTAL + QUERY_ROWS  # of all ranges so far
_ALL_TOTAL = _ALL_HIGHEST + QUERY_ROWS
_BLOCK_HIGHEST = _ALL_TOTAL + QUERY_ROWS  # of a block
_END = _BLOCK_HIGHEST + QUERY_ROWS


@njit(**INLINE)
def _queries(scratch):
    return scratch + 4 * _END


@njit(**INLINE)
def _sums(scratch, dim):
    return _queries(scratch) + QUERY_ROWS * dim * 2


@njit(**INLINE)
def _all_sums(scratch, dim):
    return _sums(scratch, dim) + QUERY_ROWS * dim * 4


@njit(**INLINE)
def _keys(scratch, dim):
    return _all_sums(scratch, dim) + QUERY_ROWS * dim * 4


@njit(**INLINE)
def _values(scratch, dim):
    return _keys(scratch, dim) + KEY_BLOCK * dim * 2


@njit(**INLINE)
def _tail(scratch, dim):
    return _values(scratch, dim) + KEY_BLOCK * dim * 2


@njit(**INLINE)
def _tile_at(model, layer, head, table, at):
    """Where the keys of the tile at position ``at`` lie; its values: ``kv_heads`` planes behind."""
    page = word(table + 8 * (at // model.block_tokens))
    keys = model.pages + page * model.page_bytes + layer * model.layer_bytes + head * model.plane_bytes
    return keys + (at % model.block_tokens) * model.head_dim * 2


@njit(**INLINE)
def _ask_for(model, layer, head, table, at):
    keys, lines = _tile_at(model, layer, head, table, at), tiles.TILE_KEYS * model.head_dim // 32
    tiles.ask_for(keys, lines)
    tiles.ask_for(keys + model.kv_heads * model.plane_bytes, lines)


@njit(**FLAGS)
def ask_ahead(model, work, layer, window, task):
    """The first tiles of a task that is about to be taken: pages lie all over memory, and no hardware foresees the next one."""
    begin = task.begin
    if window:
        begin = max(begin, max(task.position + 1 - window, 0) // KEY_BLOCK * KEY_BLOCK)
    for at in range(begin, min(begin + _AHEAD, task.end), tiles.TILE_KEYS):
        _ask_for(model, layer, task.head, work.tables + 8 * task.table, at)


@njit(**INLINE)
def _pack(model, layer, head, table, begin, end, last, scratch):
    """Keys and values [begin, end) of a block into scratch; returns how many tiles. Values of the last tile end with zeros.

    ``last``: where the keys of the task end.
    """
    dim = model.head_dim
    count = (end - begin + tiles.TILE_KEYS - 1) // tiles.TILE_KEYS
    for tile in range(count):
        at = begin + tile * tiles.TILE_KEYS
        if at + _AHEAD < last:
            _ask_for(model, layer, head, table, at + _AHEAD)
        keys = _tile_at(model, layer, head, table, at)
        values = keys + model.kv_heads * model.plane_bytes
        tiles.transpose_keys(keys, dim, _keys(scratch, dim) + tile * tiles.TILE_KEYS * dim * 2)
        held = min(end - at, tiles.TILE_KEYS)
        if held < tiles.TILE_KEYS:  # what lies behind the last token may be anything, NaN included
            tail = _tail(scratch, dim)
            vectors.copy(values, held * dim // 32, tail)
            vectors.zero(tail + held * dim * 2, (tiles.TILE_KEYS - held) * dim // 32)
            values = tail
        tiles.interleave_values(values, dim, _values(scratch, dim) + tile * tiles.TILE_KEYS * dim * 2)
    return count


@njit(**INLINE)
def _score(scratch, dim, rows, count):
    """Scores of all rows with ``count`` tiles of keys, two tiles at a time: a last odd one brings a stale neighbour along."""
    queries, keys, stride = _queries(scratch), _keys(scratch, dim), 4 * KEY_BLOCK
    for tile in range(0, count, 2):
        key, out, row = keys + tile * tiles.TILE_KEYS * dim * 2, scratch + tile * 64, 0
        while row < rows:
            query, here, left = queries + row * dim * 2, out + row * stride, rows - row
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
def _mask(scratch, rows, group, first, begin, count, window):
    """Take from each row the keys behind its query, and those before its window. Keys of the block begin at ``begin``."""
    columns = count * tiles.TILE_KEYS
    for row in range(rows):
        last = first + row // group - begin  # the query's own key, as a column
        line = scratch + row * 4 * KEY_BLOCK
        for column in range(max(last + 1, 0), columns):
            set_real(line + 4 * column, _UNSEEN)
        if window:
            for column in range(min(last + 1 - window, columns)):
                set_real(line + 4 * column, _UNSEEN)


@njit(**INLINE)
def _soften(model, scratch, dim, rows, count):
    """Scores to weights; what was summed so far is rescaled where a row's maximum rose."""
    scale, stride, row = model.score_scale, 4 * KEY_BLOCK, 0
    tops = scratch + 4 * _BLOCK_HIGHEST
    while row < rows:
        line = scratch + row * stride
        if rows - row >= 4:
            _highest_4(line, stride, count, tops + 4 * row)
            row += 4
        else:
            _highest_1(line, stride, count, tops + 4 * row)
            row += 1
    for r in range(rows):
        high, total = scratch + 4 * (_HIGHEST + r), scratch + 4 * (_TOTAL + r)
        old, top = real(high), real(tops + 4 * r)
        if top > old:
            shrink = exp2_of((old - top) * scale)
            set_real(high, top)
            set_real(total, real(total) * shrink)
            vectors.scale(_sums(scratch, dim) + r * dim * 4, dim // 16, shrink)
    row = 0
    while row < rows:
        line, out = scratch + row * stride, scratch + 4 * _WEIGHTS + row * 2 * KEY_BLOCK
        high, total = scratch + 4 * (_HIGHEST + row), scratch + 4 * (_TOTAL + row)
        if rows - row >= 4:
            _weights_4(line, stride, count, high, scale, out, 2 * KEY_BLOCK, total)
            row += 4
        else:
            _weights_1(line, stride, count, high, scale, out, 2 * KEY_BLOCK, total)
            row += 1


@njit(**INLINE)
def _weigh(scratch, dim, rows, count):
    """Add the weighted values, 64 columns at a time."""
    pairs, stride = count * tiles.TILE_KEYS // 2, 2 * KEY_BLOCK
    for column in range(0, dim - dim % 64, 64):
        value, row = _values(scratch, dim) + column * 4, 0
        while row < rows:
            weight, out, left = (
                scratch + 4 * _WEIGHTS + row * stride,
                _sums(scratch, dim) + (row * dim + column) * 4,
                rows - row,
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
        _weigh_half(scratch, dim, rows, pairs, stride)


@njit(**INLINE)
def _weigh_half(scratch, dim, rows, pairs, stride):
    """The last 32 columns of a head whose size is no multiple of 64."""
    value, row = _values(scratch, dim) + (dim - 32) * 4, 0
    while row < rows:
        weight, out, left = scratch + 4 * _WEIGHTS + row * stride, _sums(scratch, dim) + (row * dim + dim - 32) * 4, rows - row
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
def _matrix_score(scratch, dim, rows, count):
    """``_score``, 16 rows or 32 at a time: what lies behind the last one is scored, too."""
    queries, keys, stride = _queries(scratch), _keys(scratch, dim), 4 * KEY_BLOCK
    for tile in range(0, count, 2):
        key = keys + tile * tiles.TILE_KEYS * dim * 2
        for row in range(0, rows, 32):
            query, out = queries + row * dim * 2, scratch + tile * 64 + row * stride
            if rows - row > 16:
                _matrix_scores_2(query, key, dim, out, stride)
            else:
                _matrix_scores_1(query, key, dim, out, stride)


@njit(**INLINE)
def _even(scratch, dim, rows, count):
    """The matrix unit weighs keys by 32: a missing last tile is one of values that are zero, and that no row sees."""
    if count % 2:
        size = tiles.TILE_KEYS * dim * 2
        vectors.zero(_values(scratch, dim) + count * size, size // 64)
        for row in range(rows):
            vectors.fill(scratch + (row * KEY_BLOCK + count * tiles.TILE_KEYS) * 4, 1, _UNSEEN)
    return count + count % 2


@njit(**INLINE)
def _matrix_weigh(scratch, dim, rows, count):
    """``_weigh``, 32 columns at a time; ``count`` is even."""
    turns, stride = count // 2, 2 * KEY_BLOCK
    for column in range(0, dim, 32):
        value = _values(scratch, dim) + column * 4
        for row in range(0, rows, 32):
            weight, out = scratch + 4 * _WEIGHTS + row * stride, _sums(scratch, dim) + (row * dim + column) * 4
            if rows - row > 16:
                _matrix_weighted_2(weight, stride, value, dim * 4, turns, out, dim * 4)
            else:
                _matrix_weighted_1(weight, stride, value, dim * 4, turns, out, dim * 4)


@njit(**INLINE)
def _score_with_any(in_matrix, scratch, dim, rows, count):
    if HAS_MATRIX_UNIT and in_matrix:
        _matrix_score(scratch, dim, rows, count)
        return
    _score(scratch, dim, rows, count)


@njit(**INLINE)
def _weigh_with_any(in_matrix, scratch, dim, rows, count):
    if HAS_MATRIX_UNIT and in_matrix:
        _matrix_weigh(scratch, dim, rows, count)
        return
    _weigh(scratch, dim, rows, count)


@njit(**INLINE)
def _attend_range(model, in_matrix, layer, task, table, window, begin, end, flag, scratch):
    """Sums, maxima and totals of one range into scratch; rows that see no key of it keep a maximum of ``_UNSEEN``.

    False: somebody else has done the task meanwhile, as the byte at ``flag`` tells.
    """
    dim, group = model.head_dim, model.heads // model.kv_heads
    rows = task.count * group
    vectors.zero(_sums(scratch, dim), rows * dim // 16)
    for row in range(rows):
        set_real(scratch + 4 * (_HIGHEST + row), _UNSEEN)
        set_real(scratch + 4 * (_TOTAL + row), np.float32(0.0))
    if window:
        first_seen = max(task.position + 1 - window, 0)
        begin = max(begin, first_seen // KEY_BLOCK * KEY_BLOCK)
    last = task.position + task.count - 1
    for block in range(begin, end, KEY_BLOCK):
        if byte(flag):
            return False
        stop = min(block + KEY_BLOCK, end)
        count = _pack(model, layer, task.head, table, block, stop, end, scratch)
        _score_with_any(in_matrix, scratch, dim, rows, count)
        if model.softcap > 0:
            for row in range(rows):
                vectors.cap(scratch + row * 4 * KEY_BLOCK, count, model.scaling, model.softcap)
        if block + count * tiles.TILE_KEYS > task.position + 1 or (window and block < last + 1 - window):
            _mask(scratch, rows, group, task.position, block, count, window)
        if in_matrix:
            count = _even(scratch, dim, rows, count)
        _soften(model, scratch, dim, rows, count)
        _weigh_with_any(in_matrix, scratch, dim, rows, count)
    return True


@njit(**INLINE)
def _merge(model, sums, highest, total, more, more_highest, more_total):
    """Add a range to what the ranges before it made of a row; returns its new maximum and total. All but two are addresses."""
    top = max(highest, more_highest)
    mine, theirs = exp2_of((highest - top) * model.score_scale), exp2_of((more_highest - top) * model.score_scale)
    vectors.merge(sums, more, model.head_dim // 16, mine, theirs)
    return top, total * mine + more_total * theirs


@njit(**INLINE)
def _take_queries(model, queries, task, scratch):
    dim, group = model.head_dim, model.heads // model.kv_heads
    for i in range(task.count):
        source = queries + ((task.token + i) * model.heads + task.head * group) * dim * 2
        vectors.copy(source, group * dim // 32, _queries(scratch) + i * group * dim * 2)


@njit(**INLINE)
def _place_of(model, attended, token, head, row):
    """Where the result of a row goes."""
    group = model.heads // model.kv_heads
    at = (token + row // group) * model.heads + head * group + row % group
    return attended + at * model.head_dim * 2


@njit(**FLAGS)
def attend(model, work, here, layer, window, task, flag, scratch):
    """One task: its range to ``partials``, or the end of its rows to ``attended``, both in the set at ``here``."""
    dim, attended, in_matrix = model.head_dim, here + work.attended, work.tile_rows > 0
    rows = task.count * (model.heads // model.kv_heads)
    table = work.tables + 8 * task.table
    _take_queries(model, here + work.queries, task, scratch)
    if task.partial >= 0:
        if not _attend_range(model, in_matrix, layer, task, table, window, task.begin, task.end, flag, scratch):
            return
        out = here + work.partials + 4 * task.partial
        vectors.copy(_sums(scratch, dim), rows * dim // 16, out)
        for row in range(rows):
            set_real(out + 4 * (rows * dim + row), real(scratch + 4 * (_HIGHEST + row)))
            set_real(out + 4 * (rows * dim + rows + row), real(scratch + 4 * (_TOTAL + row)))
        return
    for begin in range(task.begin, task.end, KEY_RANGE):
        end = min(begin + KEY_RANGE, task.end)
        if not _attend_range(model, in_matrix, layer, task, table, window, begin, end, flag, scratch):
            return
        if begin == task.begin:
            vectors.copy(_sums(scratch, dim), rows * dim // 16, _all_sums(scratch, dim))
        for row in range(rows):
            highest, total = real(scratch + 4 * (_HIGHEST + row)), real(scratch + 4 * (_TOTAL + row))
            if begin > task.begin:
                sums, more = _all_sums(scratch, dim) + row * dim * 4, _sums(scratch, dim) + row * dim * 4
                so_far, sum_far = real(scratch + 4 * (_ALL_HIGHEST + row)), real(scratch + 4 * (_ALL_TOTAL + row))
                highest, total = _merge(model, sums, so_far, sum_far, more, highest, total)
            set_real(scratch + 4 * (_ALL_HIGHEST + row), highest)
            set_real(scratch + 4 * (_ALL_TOTAL + row), total)
    for row in range(rows):
        scale = np.float32(1.0) / real(scratch + 4 * (_ALL_TOTAL + row))
        place = _place_of(model, attended, task.token, task.head, row)
        vectors.narrow(_all_sums(scratch, dim) + row * dim * 4, dim // 16, scale, place)


@njit(**FLAGS)
def merge(model, work, here, unit, row, scratch):
    """All ranges of one row of a split unit, in order, to ``attended``."""
    dim = model.head_dim
    rows = unit.count * (model.heads // model.kv_heads)
    stride = 4 * rows * (dim + 2)
    base = here + work.partials + 4 * unit.partial
    sums = _sums(scratch, dim)
    vectors.copy(base + row * dim * 4, dim // 16, sums)
    highest, total = real(base + 4 * (rows * dim + row)), real(base + 4 * (rows * dim + rows + row))
    for i in range(1, unit.ranges):
        other = base + i * stride
        more_highest, more_total = real(other + 4 * (rows * dim + row)), real(other + 4 * (rows * dim + rows + row))
        highest, total = _merge(model, sums, highest, total, other + row * dim * 4, more_highest, more_total)
    vectors.narrow(sums, dim // 16, np.float32(1.0) / total, _place_of(model, here + work.attended, unit.token, unit.head, row))
