"""What runs in registers. Each tile is unrolled for a number of rows; whatever that number, a result has the same bits."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from moonpool.engine.compiled.lanes import BF16x16, BF16x32, F32x16, I16x32, I32x16, Lanes, words

GROUP = 16  # outputs that lie side by side in packed weights
TILE_KEYS = 16  # keys that are transposed together
_UNROLL = 2  # input pairs per turn of the inner loop
_AHEAD = 1024  # bytes: how far weights that come from memory are asked for in advance

_I64 = types.int64


def product(groups: int, tokens: int) -> Any:
    """Outputs of ``groups`` * 16 packed rows of weights for ``tokens`` rows of activations, in float32.

    tile(weights, x, x_stride, inputs, bias, out, out_stride): addresses, strides in bytes. ``inputs`` is a multiple of 4.
    """

    @intrinsic  # type: ignore[untyped-decorator]
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
                    if tokens <= 2:
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

    @intrinsic  # type: ignore[untyped-decorator]
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

    @intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
def row_highest(typing: Any, row: Any, vectors: Any) -> Any:
    """The largest of ``vectors`` * 16 float32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors = arguments
        v = Lanes(builder)
        best = v.variable(v.constant(-1e30))
        with v.loop(vectors) as turn:
            builder.store(v.larger(builder.load(best), v.load(v.at(row, v.times(turn.index, 64)))), best)
        return v.highest(builder.load(best))

    return types.float32(_I64, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_weights(typing: Any, row: Any, vectors: Any, highest: Any, scale: Any, out: Any) -> Any:
    """out (bf16) = 2 ** ((row - highest) * scale); returns the sum before rounding to bf16."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, highest, scale, out = arguments
        v = Lanes(builder)
        top, factor = v.splat(highest), v.splat(scale)
        total = v.variable(v.constant(0.0))
        with v.loop(vectors) as turn:
            score = v.load(v.at(row, v.times(turn.index, 64)))
            weight = v.exp2(builder.fmul(builder.fsub(score, top), factor))
            builder.store(builder.fadd(builder.load(total), weight), total)
            v.store(v.narrow(weight), v.at(out, v.times(turn.index, 32)), 2)
        return v.total(builder.load(total))

    return types.float32(_I64, _I64, types.float32, types.float32, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_cap(typing: Any, row: Any, vectors: Any, scale: Any, cap: Any) -> Any:
    """row = cap * tanh(row * scale / cap), in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, scale, cap = arguments
        v = Lanes(builder)
        top, inner = v.splat(cap), v.splat(builder.fdiv(builder.fmul(scale, ir.Constant(scale.type, 2.0)), cap))
        with v.loop(vectors) as turn:
            place = v.at(row, v.times(turn.index, 64))
            half = v.sigmoid(builder.fmul(v.load(place), inner))  # tanh(x) = 2 sigmoid(2 x) - 1
            v.store(builder.fmul(top, v.fma(half, v.constant(2.0), v.constant(-1.0))), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, types.float32, types.float32), code


@intrinsic  # type: ignore[untyped-decorator]
def row_scale(typing: Any, row: Any, vectors: Any, factor: Any) -> Any:
    """row *= factor, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            place = v.at(row, v.times(turn.index, 64))
            v.store(builder.fmul(v.load(place), by), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, types.float32), code


@intrinsic  # type: ignore[untyped-decorator]
def row_merge(typing: Any, row: Any, other: Any, vectors: Any, mine: Any, theirs: Any) -> Any:
    """row = row * mine + other * theirs, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, other, vectors, mine, theirs = arguments
        v = Lanes(builder)
        a, b = v.splat(mine), v.splat(theirs)
        with v.loop(vectors) as turn:
            place, there = v.at(row, v.times(turn.index, 64)), v.at(other, v.times(turn.index, 64))
            v.store(v.fma(v.load(place), a, builder.fmul(v.load(there), b)), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64, types.float32, types.float32), code


@intrinsic  # type: ignore[untyped-decorator]
def row_narrow(typing: Any, row: Any, vectors: Any, factor: Any, out: Any) -> Any:
    """out (bf16) = row * factor."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor, out = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            value = builder.fmul(v.load(v.at(row, v.times(turn.index, 64))), by)
            v.store(v.narrow(value), v.at(out, v.times(turn.index, 32)), 2)
        return context.get_dummy_value()

    return types.void(_I64, _I64, types.float32, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_add(typing: Any, row: Any, other: Any, vectors: Any) -> Any:
    """row += other, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, other, vectors = arguments
        v = Lanes(builder)
        with v.loop(vectors) as turn:
            place = v.at(row, v.times(turn.index, 64))
            v.store(builder.fadd(v.load(place), v.load(v.at(other, v.times(turn.index, 64)))), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_gate(typing: Any, row: Any, halves: Any, linear: Any, cubic: Any, out: Any) -> Any:
    """out (bf16) = x * sigmoid(x * (linear + cubic * x * x)) * up, where gate x and ``up`` take turns by 16 in ``row``.

    SiLU is (1, 0); the tanh form of GELU is 2 * sqrt(2 / pi) * (1, 0.044715).
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, halves, linear, cubic, out = arguments
        v = Lanes(builder)
        first, third = v.splat(linear), v.splat(cubic)
        with v.loop(halves) as turn:
            place = v.at(row, v.times(turn.index, 128))
            x, up = v.load(place), v.load(v.at(place, 64))
            z = builder.fmul(x, v.fma(third, builder.fmul(x, x), first))
            v.store(v.narrow(builder.fmul(builder.fmul(x, v.sigmoid(z)), up)), v.at(out, v.times(turn.index, 32)), 2)
        return context.get_dummy_value()

    return types.void(_I64, _I64, types.float32, types.float32, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_copy(typing: Any, row: Any, vectors: Any, out: Any) -> Any:
    """``vectors`` * 64 bytes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, out = arguments
        v = Lanes(builder)
        with v.loop(vectors) as turn:
            at = v.times(turn.index, 64)
            v.store(v.load(v.at(row, at), I32x16), v.at(out, at))
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_zero(typing: Any, row: Any, vectors: Any) -> Any:
    """``vectors`` * 64 bytes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors = arguments
        v = Lanes(builder)
        with v.loop(vectors) as turn:
            v.store(v.constant(0.0), v.at(row, v.times(turn.index, 64)))
        return context.get_dummy_value()

    return types.void(_I64, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
def row_widen(typing: Any, row: Any, vectors: Any, factor: Any, out: Any) -> Any:
    """out (float32) = row (bf16) * factor."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor, out = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            wide = builder.fpext(v.load(v.at(row, v.times(turn.index, 32)), BF16x16, 2), F32x16)
            v.store(builder.fmul(wide, by), v.at(out, v.times(turn.index, 64)))
        return context.get_dummy_value()

    return types.void(_I64, _I64, types.float32, _I64), code
