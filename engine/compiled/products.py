"""What phases of products are made of: tiles of outputs, and what happens to rows of tokens between two products."""

from __future__ import annotations

import numpy as np
from numba import njit

from moonpool.engine.compiled import matrix, tiles, vectors
from moonpool.engine.compiled.lanes import FLAGS, INLINE, byte, word
from moonpool.engine.compiled.matrix import HAS_MATRIX_UNIT

BLOCK = 96  # tokens that go through the products of a layer together: they and one tile of weights stay in the L2 cache
STORE, ADD, GATE = 0, 1, 2  # what becomes of a product: written, added to what stands in ``base``, or gated
TILE_BYTES = matrix.SCRATCH_BYTES if HAS_MATRIX_UNIT else 6 * 64 * 4  # of one product in scratch
WIDE, WIDE_HEAD = 4, 16  # groups of a unit: as many as a tile has, and of the output head
FEW_ROWS = 4  # tokens of a unit whose work is small

_p46, _p44, _p42, _p41 = (tiles.product(4, t) for t in (6, 4, 2, 1))
_p26, _p24, _p22, _p21 = (tiles.product(2, t) for t in (6, 4, 2, 1))
_p16, _p14, _p12, _p11 = (tiles.product(1, t) for t in (6, 4, 2, 1))
_m22, _m21, _m14, _m12, _m11 = (matrix.product(rows, groups) for rows, groups in ((2, 2), (2, 1), (1, 4), (1, 2), (1, 1)))


@njit(**INLINE)
def _tile(groups, tokens, weights, x, x_stride, inputs, bias, out, out_stride):
    if groups == 4:
        if tokens == 6:
            _p46(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 4:
            _p44(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 2:
            _p42(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _p41(weights, x, x_stride, inputs, bias, out, out_stride)
    elif groups == 2:
        if tokens == 6:
            _p26(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 4:
            _p24(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 2:
            _p22(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _p21(weights, x, x_stride, inputs, bias, out, out_stride)
    else:
        if tokens == 6:
            _p16(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 4:
            _p14(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 2:
            _p12(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _p11(weights, x, x_stride, inputs, bias, out, out_stride)


@njit(**INLINE)
def _matrix_tile(rows, groups, weights, x, x_stride, inputs, bias, out, out_stride):
    if rows == 2:
        if groups == 2:
            _m22(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _m21(weights, x, x_stride, inputs, bias, out, out_stride)
    elif groups == 4:
        _m14(weights, x, x_stride, inputs, bias, out, out_stride)
    elif groups == 2:
        _m12(weights, x, x_stride, inputs, bias, out, out_stride)
    else:
        _m11(weights, x, x_stride, inputs, bias, out, out_stride)


@njit(**INLINE)
def _any_tile(in_matrix, groups, tokens, weights, x, x_stride, inputs, bias, out, out_stride):
    if HAS_MATRIX_UNIT and in_matrix:
        _matrix_tile(2 if tokens > 16 else 1, groups, weights, x, x_stride, inputs, bias, out, out_stride)
        return
    _tile(groups, tokens, weights, x, x_stride, inputs, bias, out, out_stride)


@njit(**INLINE)
def _rows_of_tile(in_matrix, left):
    """Of ``left`` rows."""
    if in_matrix:
        return min(left, 32)
    return 4 if left == 8 else (6 if left >= 6 else (4 if left >= 4 else (2 if left >= 2 else 1)))


@njit(**FLAGS)
def product(kind, model, work, weights, bias, x, inputs, base, out, outputs, tokens, group, last_group, scratch, flag):
    """Of ``tokens`` rows at ``x`` with the groups [group, last_group) of ``weights``, to rows of ``outputs`` in ``out``.

    ``ADD``: to what stands in ``base``, which may be ``out`` if no other thread has to do with it. ``GATE``: groups come
    by two, gate and up, and ``out`` is bf16 with half as many outputs. False: somebody else has done the unit meanwhile, as
    the byte at ``flag`` tells; ``out`` is not complete.
    """
    in_matrix = work.tile_rows > 0
    while group < last_group:
        if byte(flag):
            return False
        widest = min(last_group - group, 2 if in_matrix and tokens > 16 else 4)
        wide = 4 if widest >= 4 else (2 if widest >= 2 else 1)
        packed, start, column = weights + group * inputs * 32, bias + group * 64, group * 16
        token = 0
        while token < tokens:
            many = _rows_of_tile(in_matrix, tokens - token)
            here, place = x + token * inputs * 2, out + (token * outputs + column) * 4
            if kind == STORE and not (in_matrix and many % work.tile_rows):
                _any_tile(in_matrix, wide, many, packed, here, inputs * 2, inputs, start, place, outputs * 4)
            else:
                _any_tile(in_matrix, wide, many, packed, here, inputs * 2, inputs, start, scratch, 64 * 4)
                for i in range(many):
                    place = ((token + i) * outputs + column) * 4
                    if kind == STORE:
                        vectors.copy(scratch + i * 256, wide, out + place)
                    elif kind == ADD:
                        vectors.add(base + place, scratch + i * 256, wide, out + place)
                    else:
                        place = out + ((token + i) * outputs + column // 2) * 2
                        vectors.gate(scratch + i * 256, wide // 2, model.gate_linear, model.gate_cubic, place)
            token += many
        group += wide
    return True


@njit(**INLINE)
def set_of(work, layer):
    """The buffers of ``layer``; those of -1 hold what the embedding made."""
    return work.ring + (layer + 1) % work.sets * work.set_bytes


@njit(**INLINE)
def norm_rows(model, states, tokens, weight, out):
    """Rows of float32 to rows of bf16."""
    for t in range(tokens):
        vectors.norm_narrow(states + t * model.hidden * 4, model.hidden, weight, model.eps, out + t * model.hidden * 2)


@njit(**FLAGS)
def keys_values(model, layer, work, here, index, qkv, token, last, own):
    """Of q, k, v at ``qkv``: norms of heads, rotary embedding, K and V into pages, queries to bf16."""
    dim, heads = model.head_dim, model.heads + model.kv_heads
    size, kept = (heads + model.kv_heads) * dim, own + model.own_row
    for t in range(token, last):
        row = qkv + (t - token) * size * 4
        position = word(work.positions + 8 * t)
        cos, sin = layer.cos + position * dim * 2, layer.sin + position * dim * 2
        slot = model.pages + index * model.layer_bytes + word(work.places + 8 * t)
        for head in range(heads):
            at = row + head * dim * 4
            weight = layer.query_norm if head < model.heads else layer.key_norm
            if weight:
                vectors.copy(at, dim // 16, kept)
                vectors.norm(kept, dim, weight, model.eps)
                at = kept
            if head < model.heads:
                vectors.rotate(at, dim // 32, cos, sin, here + work.queries + (t * model.heads + head) * dim * 2)
            else:
                vectors.rotate(at, dim // 32, cos, sin, slot + (head - model.heads) * model.plane_bytes)
        for head in range(model.kv_heads):
            place = slot + (model.kv_heads + head) * model.plane_bytes
            vectors.narrow(row + (heads + head) * dim * 4, dim // 16, np.float32(1.0), place)


@njit(**INLINE)
def settled(model, mixed, base, after, out, kept):
    """out = base + norm(mixed), of one token; ``kept``: room of this thread's own for a row."""
    vectors.copy(mixed, model.hidden // 16, kept)
    vectors.norm(kept, model.hidden, after, model.eps)
    vectors.add(base, kept, model.hidden // 16, out)
