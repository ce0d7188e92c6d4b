"""One row of numbers at a time, vectors of 16: softmax, sums, conversions, gates, norms and the rotary embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from moonpool.engine.compiled.lanes import EXP2_BF16, F32, INLINE, BF16x16, F32x16, I32x16, Lanes

_I64, _F32 = types.int64, types.float32


def highest(rows: int) -> Any:
    """The largest of ``vectors`` * 16 float32 in each of ``rows`` rows, which are computed side by side.

    each(row, stride, vectors, out): addresses, stride in bytes; out float32 [rows]; none is below -1e30.
    """

    @intrinsic
    def each(typing: Any, row: Any, stride: Any, vectors: Any, out: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, stride, vectors, out = arguments
            v = Lanes(builder)
            starts = [v.at(row, v.times(stride, r)) for r in range(rows)]
            best = [v.variable(v.constant(-1e30)) for _ in range(rows)]
            with v.loop(vectors) as turn:
                for start, top in zip(starts, best, strict=True):
                    builder.store(v.larger(builder.load(top), v.load(v.at(start, v.times(turn.index, 64)))), top)
            for r, top in enumerate(best):
                v.store(v.highest(builder.load(top)), v.at(out, 4 * r))
            return context.get_dummy_value()

        return types.void(*[_I64] * 4), code

    return each


def weights(rows: int) -> Any:
    """out (bf16) = 2 ** ((row - top) * scale) of each row; adds its sum, taken before rounding to bf16, to its total.

    each(row, stride, vectors, tops, scale, out, out_stride, totals): addresses, strides in bytes; tops, totals float32 [rows].
    """

    @intrinsic
    def each(
        typing: Any, row: Any, stride: Any, vectors: Any, tops: Any, scale: Any, out: Any, out_stride: Any, totals: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            row, stride, vectors, tops, scale, out, out_stride, totals = arguments
            v = Lanes(builder)
            factor = v.splat(scale)
            starts = [v.at(row, v.times(stride, r)) for r in range(rows)]
            ends = [v.at(out, v.times(out_stride, r)) for r in range(rows)]
            shift = [v.splat(builder.fneg(builder.fmul(v.load(v.at(tops, 4 * r), F32), scale))) for r in range(rows)]
            sums = [v.variable(v.constant(0.0)) for _ in range(rows)]
            with v.loop(vectors) as turn:
                at, narrow = v.times(turn.index, 64), v.times(turn.index, 32)
                for r in range(rows):
                    score = v.load(v.at(starts[r], at))
                    weight = v.exp2(v.fma(score, factor, shift[r]), EXP2_BF16)
                    builder.store(builder.fadd(builder.load(sums[r]), weight), sums[r])
                    v.store(v.narrow(weight), v.at(ends[r], narrow), 2)
            for r in range(rows):
                place = v.at(totals, 4 * r)
                v.store(builder.fadd(v.load(place, F32), v.total(builder.load(sums[r]))), place)
            return context.get_dummy_value()

        return types.void(*[_I64] * 4, _F32, *[_I64] * 3), code

    return each


@intrinsic
def cap(typing: Any, row: Any, vectors: Any, scale: Any, cap: Any) -> Any:
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

    return types.void(_I64, _I64, _F32, _F32), code


@intrinsic
def scale(typing: Any, row: Any, vectors: Any, factor: Any) -> Any:
    """row *= factor, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            place = v.at(row, v.times(turn.index, 64))
            v.store(builder.fmul(v.load(place), by), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _F32), code


@intrinsic
def merge(typing: Any, row: Any, other: Any, vectors: Any, mine: Any, theirs: Any) -> Any:
    """row = row * mine + other * theirs, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, other, vectors, mine, theirs = arguments
        v = Lanes(builder)
        a, b = v.splat(mine), v.splat(theirs)
        with v.loop(vectors) as turn:
            place, there = v.at(row, v.times(turn.index, 64)), v.at(other, v.times(turn.index, 64))
            v.store(v.fma(v.load(place), a, builder.fmul(v.load(there), b)), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64, _F32, _F32), code


@intrinsic
def narrow(typing: Any, row: Any, vectors: Any, factor: Any, out: Any) -> Any:
    """out (bf16) = row * factor."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor, out = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            value = builder.fmul(v.load(v.at(row, v.times(turn.index, 64))), by)
            v.store(v.narrow(value), v.at(out, v.times(turn.index, 32)), 2)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _F32, _I64), code


@intrinsic
def add(typing: Any, row: Any, other: Any, vectors: Any, out: Any) -> Any:
    """out = row + other; ``out`` may be one of them."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, other, vectors, out = arguments
        v = Lanes(builder)
        with v.loop(vectors) as turn:
            at = v.times(turn.index, 64)
            v.store(builder.fadd(v.load(v.at(row, at)), v.load(v.at(other, at))), v.at(out, at))
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64, _I64), code


@intrinsic
def gate(typing: Any, row: Any, halves: Any, linear: Any, cubic: Any, out: Any) -> Any:
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

    return types.void(_I64, _I64, _F32, _F32, _I64), code


@intrinsic
def copy(typing: Any, row: Any, vectors: Any, out: Any) -> Any:
    """``vectors`` * 64 bytes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, out = arguments
        v = Lanes(builder)
        with v.loop(vectors) as turn:
            at = v.times(turn.index, 64)
            v.store(v.load(v.at(row, at), I32x16), v.at(out, at))
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64), code


@intrinsic
def zero(typing: Any, row: Any, vectors: Any) -> Any:
    """``vectors`` * 64 bytes."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors = arguments
        v = Lanes(builder)
        with v.loop(vectors) as turn:
            v.store(v.constant(0.0), v.at(row, v.times(turn.index, 64)))
        return context.get_dummy_value()

    return types.void(_I64, _I64), code


@intrinsic
def fill(typing: Any, row: Any, vectors: Any, value: Any) -> Any:
    """``vectors`` * 16 float32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, value = arguments
        v = Lanes(builder)
        lanes = v.splat(value)
        with v.loop(vectors) as turn:
            v.store(lanes, v.at(row, v.times(turn.index, 64)))
        return context.get_dummy_value()

    return types.void(_I64, _I64, _F32), code


@intrinsic
def widen(typing: Any, row: Any, vectors: Any, factor: Any, out: Any) -> Any:
    """out (float32) = row (bf16) * factor."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor, out = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            wide = builder.fpext(v.load(v.at(row, v.times(turn.index, 32)), BF16x16, 2), F32x16)
            v.store(builder.fmul(wide, by), v.at(out, v.times(turn.index, 64)))
        return context.get_dummy_value()

    return types.void(_I64, _I64, _F32, _I64), code


@intrinsic
def _squares(typing: Any, row: Any, vectors: Any) -> Any:
    """Sum of squares."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors = arguments
        v = Lanes(builder)
        total = v.variable(v.constant(0.0))
        with v.loop(vectors) as turn:
            x = v.load(v.at(row, v.times(turn.index, 64)))
            builder.store(v.fma(x, x, builder.load(total)), total)
        return v.total(builder.load(total))

    return _F32(_I64, _I64), code


@intrinsic
def _scaled_narrow(typing: Any, row: Any, vectors: Any, factor: Any, weight: Any, out: Any) -> Any:
    """out (bf16) = row * factor * weight."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor, weight, out = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            at = v.times(turn.index, 64)
            value = builder.fmul(builder.fmul(v.load(v.at(row, at)), by), v.load(v.at(weight, at)))
            v.store(v.narrow(value), v.at(out, v.times(turn.index, 32)), 2)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _F32, _I64, _I64), code


@intrinsic
def _scaled(typing: Any, row: Any, vectors: Any, factor: Any, weight: Any) -> Any:
    """row *= factor * weight, in place."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, vectors, factor, weight = arguments
        v = Lanes(builder)
        by = v.splat(factor)
        with v.loop(vectors) as turn:
            at = v.times(turn.index, 64)
            place = v.at(row, at)
            v.store(builder.fmul(builder.fmul(v.load(place), by), v.load(v.at(weight, at))), place)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _F32, _I64), code


@intrinsic
def rotate(typing: Any, row: Any, half_vectors: Any, cos: Any, sin: Any, out: Any) -> Any:
    """out (bf16) = row with each pair (i, i + half) turned by its angle."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row, half_vectors, cos, sin, out = arguments
        v = Lanes(builder)
        with v.loop(half_vectors) as turn:
            at, narrow = v.times(turn.index, 64), v.times(turn.index, 32)
            a, b = v.load(v.at(row, at)), v.load(v.at(row, v.times(half_vectors, 64), at))
            c, s = v.load(v.at(cos, at)), v.load(v.at(sin, at))
            v.store(v.narrow(builder.fsub(builder.fmul(a, c), builder.fmul(b, s))), v.at(out, narrow), 2)
            turned = builder.fadd(builder.fmul(b, c), builder.fmul(a, s))
            v.store(v.narrow(turned), v.at(out, v.times(half_vectors, 32), narrow), 2)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64, _I64, _I64), code


@njit(**INLINE)
def _over_rms(row, n, eps):
    return np.float32(1.0) / np.sqrt(_squares(row, n // 16) / np.float32(n) + eps)


@njit(**INLINE)
def norm_narrow(row, n, weight, eps, out):
    """out (bf16) = row / rms(row) * weight, of ``n`` values. Root mean square norm: Zhang and Sennrich, NeurIPS 2019."""
    _scaled_narrow(row, n // 16, _over_rms(row, n, eps), weight, out)


@njit(**INLINE)
def norm(row, n, weight, eps):
    """The same, in place."""
    _scaled(row, n // 16, _over_rms(row, n, eps), weight)
