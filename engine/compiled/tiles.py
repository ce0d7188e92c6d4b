"""What runs in registers. Each tile is unrolled for a number of rows; whatever that number, a result has the same bits."""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from moonpool.engine.compiled.lanes import BF16x32, I16x32, I32x16, Lanes, words

GROUP = 16  # outputs that lie side by side in packed weights
TILE_KEYS = 16  # keys that are transposed together
_UNROLL = 2  # input pairs per turn of the inner loop
_AHEAD = 1024  # bytes: how far weights that come from memory are asked for in advance

_I64 = types.int64


def product(groups: int, tokens: int) -> Any:
    """Outputs of ``groups`` * 16 packed rows of weights for ``tokens`` rows of activations, in float32.

    tile(weights, x, x_stride, inputs, bias, out, out_stride): addresses, strides in bytes. ``inputs`` is a multiple of 4.
    """

    @intrinsic
    def tile(typing: Any, weights: Any, x: Any, x_stride: Any, inputs: Any, bias: Any, out: Any, out_stride: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, x, x_stride, inputs, bias, out, out_stride = arguments
            v = Lanes(builder)
            streams = [v.at(weights, v.times(inputs, 2 * GROUP * g)) for g in range(groups)]
            rows = [v.at(x, v.times(x_stride, t)) for t in range(tokens)]
            start = [v.load(v.at(bias, 64 * g)) for g in range(groups)]
            sums = [[v.variable(start[g]) for g in range(groups)] for _ in range(tokens)]
            with v.loop(builder.udiv(inputs, words(2 * _UNROLL))) as turn:
                for step in range(_UNROLL):
                    at = v.at(v.times(turn.index, _UNROLL), step)
                    there, here = v.times(at, 64), v.times(at, 4)
                    lines = [v.load(v.at(stream, there), BF16x32) for stream in streams]
                    if tokens <= 6:
                        for stream in streams:
                            v.prefetch(v.at(stream, there, _AHEAD))
                    for t in range(tokens):
                        both = v.pair(v.at(rows[t], here))
                        for g in range(groups):
                            builder.store(v.dot(builder.load(sums[t][g]), lines[g], both), sums[t][g])
            for t in range(tokens):
                for g in range(groups):
                    v.store(builder.load(sums[t][g]), v.at(out, v.times(out_stride, t), 64 * g))
            return context.get_dummy_value()

        return types.void(*[_I64] * 7), code

    return tile


def scores(rows: int, tiles: int) -> Any:
    """Dot products of ``rows`` queries with the keys of ``tiles`` transposed tiles.

    tile(queries, keys, head_dim, out, out_stride): queries bf16 [rows][head_dim], out float32.
    """

    @intrinsic
    def tile(typing: Any, queries: Any, keys: Any, head_dim: Any, out: Any, out_stride: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            queries, keys, head_dim, out, out_stride = arguments
            v = Lanes(builder)
            starts = [v.at(queries, v.times(head_dim, 2 * r)) for r in range(rows)]
            streams = [v.at(keys, v.times(head_dim, 2 * TILE_KEYS * t)) for t in range(tiles)]
            sums = [[v.variable(v.constant(0.0)) for _ in range(tiles)] for _ in range(rows)]
            with v.loop(builder.udiv(head_dim, words(2))) as turn:
                lines = [v.load(v.at(stream, v.times(turn.index, 64)), BF16x32) for stream in streams]
                for r in range(rows):
                    both = v.pair(v.at(starts[r], v.times(turn.index, 4)))
                    for t in range(tiles):
                        builder.store(v.dot(builder.load(sums[r][t]), lines[t], both), sums[r][t])
            for r in range(rows):
                for t in range(tiles):
                    v.store(builder.load(sums[r][t]), v.at(out, v.times(out_stride, r), 64 * t))
            return context.get_dummy_value()

        return types.void(*[_I64] * 5), code

    return tile


def weighted(rows: int, columns: int) -> Any:
    """Adds the values of ``pairs`` token pairs, weighted, to ``rows`` sums of ``columns`` * 16 columns.

    tile(weights, weights_stride, values, values_stride, pairs, out, out_stride): weights bf16, values interleaved, out float32.
    """

    @intrinsic
    def tile(typing: Any, w: Any, w_stride: Any, values: Any, v_stride: Any, pairs: Any, out: Any, out_stride: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            w, w_stride, values, v_stride, pairs, out, out_stride = arguments
            v = Lanes(builder)
            starts = [v.at(w, v.times(w_stride, r)) for r in range(rows)]
            places = [[v.at(out, v.times(out_stride, r), 64 * c) for c in range(columns)] for r in range(rows)]
            sums = [[v.variable(v.load(place)) for place in row] for row in places]
            with v.loop(pairs) as turn:
                line = v.at(values, builder.mul(turn.index, v_stride))
                lines = [v.load(v.at(line, 64 * c), BF16x32) for c in range(columns)]
                for r in range(rows):
                    both = v.pair(v.at(starts[r], v.times(turn.index, 4)))
                    for c in range(columns):
                        builder.store(v.dot(builder.load(sums[r][c]), lines[c], both), sums[r][c])
            for row, kept in zip(places, sums, strict=True):
                for place, value in zip(row, kept, strict=True):
                    v.store(builder.load(value), place)
            return context.get_dummy_value()

        return types.void(*[_I64] * 7), code

    return tile


@intrinsic
def transpose_keys(typing: Any, keys: Any, head_dim: Any, out: Any) -> Any:
    """16 keys, bf16 [16][head_dim] one after another, into a tile [head_dim / 2][16][2]. ``head_dim``: a multiple of 32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        keys, head_dim, out = arguments
        v = Lanes(builder)
        with v.loop(builder.udiv(head_dim, words(32))) as turn:
            there = v.at(keys, v.times(turn.index, 64))
            rows = [v.load(v.at(there, v.times(head_dim, 2 * r)), I32x16) for r in range(16)]
            for distance in (8, 4, 2, 1):  # swap the off-diagonal quarters of ever smaller squares
                keep = [16 + i - distance if i & distance else i for i in range(16)]
                take = [16 + i if i & distance else i + distance for i in range(16)]
                for r in range(16):
                    if not r & distance:
                        a, b = rows[r], rows[r + distance]
                        rows[r], rows[r + distance] = v.shuffle(a, b, keep), v.shuffle(a, b, take)
            here = v.at(out, v.times(turn.index, 16 * 64))
            for r in range(16):
                v.store(rows[r], v.at(here, 64 * r))
        return context.get_dummy_value()

    return types.void(*[_I64] * 3), code


@intrinsic
def ask_for(typing: Any, start: Any, lines: Any) -> Any:
    """Have ``lines`` cache lines from ``start`` on come into the L2 cache meanwhile."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, lines = arguments
        v = Lanes(builder)
        with v.loop(lines) as turn:
            v.prefetch(v.at(start, v.times(turn.index, 64)), near=2)
        return context.get_dummy_value()

    return types.void(*[_I64] * 2), code


@intrinsic
def interleave_values(typing: Any, values: Any, head_dim: Any, out: Any) -> Any:
    """Values of 16 tokens, bf16 [16][head_dim] one after another, into [8][head_dim][2]."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, head_dim, out = arguments
        v = Lanes(builder)
        low = [i // 2 + 32 * (i % 2) for i in range(32)]
        with v.loop(builder.udiv(head_dim, words(32))) as turn:
            for pair in range(8):
                there = v.at(values, v.times(head_dim, 4 * pair), v.times(turn.index, 64))
                a, b = v.load(there, I16x32), v.load(v.at(there, v.times(head_dim, 2)), I16x32)
                here = v.at(out, v.times(head_dim, 4 * pair), v.times(turn.index, 128))
                v.store(v.shuffle(a, b, low), here)
                v.store(v.shuffle(a, b, [i + 16 for i in low]), v.at(here, 64))
        return context.get_dummy_value()

    return types.void(*[_I64] * 3), code
