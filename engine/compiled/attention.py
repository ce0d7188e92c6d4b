"""Queries of one K/V head against pages: an online softmax (FlashAttention, Dao et al., 2022) whose bits never vary.

Keys come in blocks of KEY_BLOCK from position 0 on; blocks form ranges of KEY_RANGE. Within a range a running maximum
rescales what came before; ranges are merged in order by the same formula, whether one task computed them all or several did.
A key that a query may not see weighs exactly 0, so what else a block holds changes nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moonpool.engine.compiled import places, tiles, vectors
from moonpool.engine.compiled.key_blocks import AHEAD, MATRIX_ROWS, UNSEEN, add_block, ask_for, pack
from moonpool.engine.compiled.lanes import FLAGS, INLINE, byte, exp2_of, real, set_real
from moonpool.engine.compiled.places import KEY_BLOCK, SCORE_ROWS

KEY_RANGE = 512


@njit(**FLAGS)
def ask_ahead(model, work, layer, window, task):
    """The first tiles of a task that is about to be taken: pages lie all over memory, and no hardware foresees the next one."""
    begin = task.begin
    if window:
        begin = max(begin, max(task.position + 1 - window, 0) // KEY_BLOCK * KEY_BLOCK)
    for at in range(begin, min(begin + AHEAD, task.end), tiles.TILE_KEYS):
        ask_for(model, layer, task.head, work.tables + 8 * task.table, at)


@njit(**INLINE)
def _attend_range(model, in_matrix, layer, task, table, window, begin, end, flag, scratch):
    """Sums, maxima and totals of one range into scratch; rows that see no key of it keep a maximum of ``UNSEEN``.

    False: somebody else has done the task meanwhile, as the byte at ``flag`` tells.
    """
    dim, group = model.head_dim, model.heads // model.kv_heads
    rows = task.count * group
    vectors.zero(places.sums(scratch, dim), rows * dim // 16)
    for row in range(rows):
        set_real(scratch + 4 * (places.HIGHEST + row), UNSEEN)
        set_real(scratch + 4 * (places.TOTAL + row), np.float32(0.0))
    if window:
        first_seen = max(task.position + 1 - window, 0)
        begin = max(begin, first_seen // KEY_BLOCK * KEY_BLOCK)
    last, at_once = task.position + task.count - 1, MATRIX_ROWS if in_matrix else SCORE_ROWS
    for block in range(begin, end, KEY_BLOCK):
        if byte(flag):
            return False
        stop = min(block + KEY_BLOCK, end)
        count = pack(model, layer, task.head, table, block, stop, end, scratch)
        masks = block + count * tiles.TILE_KEYS > task.position + 1 or (window and block < last + 1 - window)
        for first in range(0, rows, at_once):
            add_block(model, in_matrix, task, window, first, min(first + at_once, rows), block, count, masks, scratch)
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
        vectors.copy(source, group * dim // 32, places.queries(scratch) + i * group * dim * 2)


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
        vectors.copy(places.sums(scratch, dim), rows * dim // 16, out)
        for row in range(rows):
            set_real(out + 4 * (rows * dim + row), real(scratch + 4 * (places.HIGHEST + row)))
            set_real(out + 4 * (rows * dim + rows + row), real(scratch + 4 * (places.TOTAL + row)))
        return
    for begin in range(task.begin, task.end, KEY_RANGE):
        end = min(begin + KEY_RANGE, task.end)
        if not _attend_range(model, in_matrix, layer, task, table, window, begin, end, flag, scratch):
            return
        if begin == task.begin:
            vectors.copy(places.sums(scratch, dim), rows * dim // 16, places.all_sums(scratch, dim))
        for row in range(rows):
            highest, total = real(scratch + 4 * (places.HIGHEST + row)), real(scratch + 4 * (places.TOTAL + row))
            if begin > task.begin:
                sums, more = places.all_sums(scratch, dim) + row * dim * 4, places.sums(scratch, dim) + row * dim * 4
                so_far, sum_far = real(scratch + 4 * (places.ALL_HIGHEST + row)), real(scratch + 4 * (places.ALL_TOTAL + row))
                highest, total = _merge(model, sums, so_far, sum_far, more, highest, total)
            set_real(scratch + 4 * (places.ALL_HIGHEST + row), highest)
            set_real(scratch + 4 * (places.ALL_TOTAL + row), total)
    for row in range(rows):
        scale = np.float32(1.0) / real(scratch + 4 * (places.ALL_TOTAL + row))
        place = _place_of(model, attended, task.token, task.head, row)
        vectors.narrow(places.all_sums(scratch, dim) + row * dim * 4, dim // 16, scale, place)


@njit(**FLAGS)
def merge(model, work, here, unit, row, scratch):
    """All ranges of one row of a split unit, in order, to ``attended``."""
    dim = model.head_dim
    rows = unit.count * (model.heads // model.kv_heads)
    stride = 4 * rows * (dim + 2)
    base = here + work.partials + 4 * unit.partial
    sums = places.sums(scratch, dim)
    vectors.copy(base + row * dim * 4, dim // 16, sums)
    highest, total = real(base + 4 * (rows * dim + row)), real(base + 4 * (rows * dim + rows + row))
    for i in range(1, unit.ranges):
        other = base + i * stride
        more_highest, more_total = real(other + 4 * (rows * dim + row)), real(other + 4 * (rows * dim + rows + row))
        highest, total = _merge(model, sums, highest, total, other + row * dim * 4, more_highest, more_total)
    vectors.narrow(sums, dim // 16, np.float32(1.0) / total, _place_of(model, here + work.attended, unit.token, unit.head, row))
