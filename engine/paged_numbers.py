"""Numbers, addresses and one atomic step for the kernels beside this file: the words that numba itself lacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

_Function = TypeVar("_Function", bound=Callable[..., Any])
_EXACT = {"fastmath": {"contract"}}
sums_in_lanes = cast(Callable[[_Function], _Function], njit(fastmath={"reassoc", "contract"}))
compiled = cast(Callable[[_Function], _Function], njit(**_EXACT))


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(typing: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic  # type: ignore[untyped-decorator]
def _bits_of(typing: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing: Any, address: Any, step: Any) -> Any:
    """The int64 at ``address`` before ``step`` was added. What others wrote before their own ``fetch_add`` is seen after it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cell = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", cell, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing: Any, address: Any) -> Any:
    """Have the cache line at ``address`` on its way; one that does not exist is no error."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(hint, [builder.inttoptr(args[0], byte), *(ir.Constant(word, n) for n in (0, 3, 1))])  # read, near, data
        return context.get_dummy_value()

    return types.void(types.int64), build


def widen(stored: Any) -> Any:
    """A stored number as float32: uint16 is bfloat16."""
    raise NotImplementedError("compiled code only")


def narrow(number: Any, kind: Any) -> Any:
    """As it is stored, in uint16 or float32 (``kind``): the nearest, or the even one of two as near. NaN stays NaN."""
    raise NotImplementedError("compiled code only")


@overload(widen, jit_options=_EXACT)  # type: ignore[untyped-decorator]
def _widen(stored: Any) -> Any:
    def from_bfloat16(stored: Any) -> Any:
        return _float_of(np.uint32(stored) << np.uint32(16))

    def same(stored: Any) -> Any:
        return stored

    return from_bfloat16 if stored == types.uint16 else same


@overload(narrow, jit_options=_EXACT)  # type: ignore[untyped-decorator]
def _narrow(number: Any, kind: Any) -> Any:
    def to_bfloat16(number: Any, kind: Any) -> Any:
        if number != number:
            return np.uint16(0x7FC0)
        bits = _bits_of(number)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    def same(number: Any, kind: Any) -> Any:
        return number

    return to_bfloat16 if kind.dtype == types.uint16 else same


# 2**r = sum of (r ln 2)**k / k!, to 6e-9 for -1/2 <= r <= 1/2.
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(8))
_ROUND = np.float32(1.5 * 2**23)  # what is added to it is rounded: its last bits are the whole number
_LOWEST = np.float32(-126)  # 2**-126 is the least normal float32, and nothing beside a weight of 1
LOG2E = np.float32(math.log2(math.e))


@compiled
def exp2(x: Any) -> Any:
    """2**x for x <= 0, NaN for NaN. Plain arithmetic, so that loops over it become vectors."""
    x = _LOWEST if x < _LOWEST else x
    whole = x + _ROUND
    r = x - (whole - _ROUND)
    power = ((((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    return power * _float_of((_bits_of(whole) + np.uint32(127)) << np.uint32(23))


@compiled
def tanh(x: Any) -> Any:
    small = exp2(np.float32(-2) * LOG2E * abs(x))
    size = (np.float32(1) - small) / (np.float32(1) + small)
    return -size if x < 0 else size
