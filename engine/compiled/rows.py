"""Norms and the rotary embedding: one row of float32 at a time, vectors of 16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from moonpool.engine.compiled.lanes import Lanes

_I64, _F32 = types.int64, types.float32
FLAGS = {"nogil": True, "cache": True, "error_model": "numpy"}
# Part of its callers: each function that numba compiles by itself is optimized again by LLVM in every caller's caller.
INLINE = {**FLAGS, "inline": "always"}


@intrinsic  # type: ignore[untyped-decorator]
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

    return types.float32(_I64, _I64), code


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
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


@intrinsic  # type: ignore[untyped-decorator]
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


@njit(**INLINE)  # type: ignore[untyped-decorator]
def _over_rms(row, n, eps):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / np.sqrt(_squares(row, n // 16) / np.float32(n) + eps)


@njit(**INLINE)  # type: ignore[untyped-decorator]
def norm_narrow(row, n, weight, eps, out):  # type: ignore[no-untyped-def]
    """out (bf16) = row / rms(row) * weight, of ``n`` values. Root mean square norm: Zhang and Sennrich, NeurIPS 2019."""
    _scaled_narrow(row, n // 16, _over_rms(row, n, eps), weight, out)


@njit(**INLINE)  # type: ignore[untyped-decorator]
def norm(row, n, weight, eps):  # type: ignore[no-untyped-def]
    """The same, in place."""
    _scaled(row, n // 16, _over_rms(row, n, eps), weight)
