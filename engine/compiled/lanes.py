"""The vocabulary of vector code: 512-bit vectors in LLVM's terms, and the few scalar intrinsics that numba lacks.

Addresses are int64. What an address points into must outlive the call: numba frees an array after its last mention.
"""

from __future__ import annotations

import moonpool.engine.kernel_cache  # noqa: F401  # isort: skip  # before numba compiles anything
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# For numba.
FLAGS = {"nogil": True, "cache": True, "error_model": "numpy"}
# Part of its callers: each function that numba compiles by itself is optimized again by LLVM in every caller's caller.
INLINE = {**FLAGS, "inline": "always"}

LANES = 16  # float32 in a vector
LOG2E = 1.4426950408889634


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I8, I32, I64, F32, BF16 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType(), _BFloat()
POINTER = ir.PointerType()
F32x16, I32x16 = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
BF16x16, BF16x32 = ir.VectorType(BF16, 16), ir.VectorType(BF16, 32)
I16x32 = ir.VectorType(ir.IntType(16), 32)

# 2 ** x on [-0.5, 0.5], highest power first; relative errors of 3e-7, and of 1e-4 for what is rounded to bf16 at once
EXP2 = (0.0013333558, 0.009618129, 0.05550411, 0.24022651, 0.69314718, 1.0)
EXP2_BF16 = (0.0551716649, 0.2426111219, 0.6932609862, 0.9999280736)
_EVERY_LANE, _CURRENT_ROUNDING = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)


def words(n: int) -> ir.Constant:
    return ir.Constant(I64, n)


class Lanes:
    """Emits vector code through one IR builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, base: Any, *offsets: Any) -> Any:
        for offset in offsets:
            base = self.builder.add(base, words(offset) if isinstance(offset, int) else offset)
        return base

    def times(self, a: Any, n: int) -> Any:
        return self.builder.mul(a, words(n))

    def load(self, address: Any, kind: Any = F32x16, align: int = 4) -> Any:
        loaded = self.builder.load(self.pointer(address), typ=kind)
        loaded.align = align
        return loaded

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        self.builder.store(value, self.pointer(address)).align = align

    def splat(self, scalar: Any, kind: Any = F32x16) -> Any:
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.shuffle(one, ir.Constant(kind, ir.Undefined), [0] * kind.count)

    def constant(self, x: float) -> Any:
        return ir.Constant(F32x16, [ir.Constant(F32, x)] * LANES)

    def pair(self, address: Any) -> Any:
        """The two bf16 at ``address`` in every lane."""
        return self.builder.bitcast(self.splat(self.load(address, I32), I32x16), BF16x32)

    def dot(self, acc: Any, a: Any, b: Any) -> Any:
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", F32x16, acc, a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._call("llvm.fma.v16f32", F32x16, a, b, c)

    def larger(self, a: Any, b: Any) -> Any:
        """One instruction; LLVM's own ``maxnum`` is four, for the sake of NaN."""
        return self._call("llvm.x86.avx512.max.ps.512", F32x16, a, b, _CURRENT_ROUNDING)

    def smaller(self, a: Any, b: Any) -> Any:
        return self._call("llvm.x86.avx512.min.ps.512", F32x16, a, b, _CURRENT_ROUNDING)

    def narrow(self, x: Any) -> Any:
        """float32 to bf16, to nearest even."""
        return self.builder.fptrunc(x, BF16x16)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        indices = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, i) for i in lanes])
        return self.builder.shuffle_vector(a, b, indices)

    def exp2(self, x: Any, powers: tuple[float, ...] = EXP2) -> Any:
        """Exactly 0 far below -126: what is masked must not reach a sum. ``x`` at most 127."""
        whole = self._call("llvm.nearbyint.v16f32", F32x16, x)
        part = self.builder.fsub(x, whole)
        value = self.constant(powers[0])
        for c in powers[1:]:
            value = self.fma(value, part, self.constant(c))
        return self._call(
            "llvm.x86.avx512.mask.scalef.ps.512", F32x16, value, whole, self.constant(0.0), _EVERY_LANE, _CURRENT_ROUNDING
        )

    def sigmoid(self, x: Any) -> Any:
        e = self.exp2(self.smaller(self.builder.fmul(x, self.constant(-LOG2E)), self.constant(126.0)))
        return self.builder.fdiv(self.constant(1.0), self.builder.fadd(self.constant(1.0), e))

    def highest(self, x: Any) -> Any:
        return self._of_lanes(x, self.larger)

    def total(self, x: Any) -> Any:
        return self._of_lanes(x, self.builder.fadd)

    def _of_lanes(self, x: Any, both: Callable[[Any, Any], Any]) -> Any:
        """All lanes in one, pairwise: always in the same order."""
        for distance in (8, 4, 2, 1):
            x = both(x, self.shuffle(x, x, [(i + distance) % LANES for i in range(LANES)]))
        return self.builder.extract_element(x, ir.Constant(I32, 0))

    def prefetch(self, address: Any, near: int = 3) -> None:
        """``near``: 3 is into the L1 cache, 2 into the L2 cache."""
        fn = self.function("llvm.prefetch.p0", ir.VoidType(), [POINTER, I32, I32, I32])
        read, where, data = ir.Constant(I32, 0), ir.Constant(I32, near), ir.Constant(I32, 1)
        self.builder.call(fn, [self.pointer(address), read, where, data])

    def variable(self, value: Any) -> Any:
        """A mutable vector; the optimizer keeps it in a register."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    def loop(self, count: Any) -> Any:
        return cgutils.for_range(self.builder, count, intp=I64)

    def pointer(self, address: Any) -> Any:
        return self.builder.inttoptr(address, POINTER)

    def _call(self, name: str, result: Any, *values: Any) -> Any:
        return self.builder.call(self.function(name, result, [v.type for v in values]), list(values))

    def function(self, name: str, result: Any, kinds: list[Any]) -> Any:
        module = self.builder.module
        return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, kinds), name)


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Of the first element of a contiguous array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.ptrtoint(made.data, I64)

    return types.int64(array), code


@intrinsic
def exp2_of(typing: Any, x: Any) -> Any:
    """float32: the same exponential as that of vectors, bit by bit."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = Lanes(builder)
        return builder.extract_element(lanes.exp2(lanes.splat(arguments[0])), ir.Constant(I32, 0))

    return types.float32(types.float32), code


@intrinsic
def atomic_add(typing: Any, where: Any, n: Any) -> Any:
    """Adds to the int64 at address ``where``; returns what was there."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], POINTER), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def atomic_load(typing: Any, where: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], POINTER), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), code


@intrinsic
def atomic_set(typing: Any, where: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.atomic_rmw("xchg", builder.inttoptr(arguments[0], POINTER), arguments[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def byte(typing: Any, where: Any) -> Any:
    """The byte at an address, which others may write."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        read = builder.load_atomic(builder.inttoptr(arguments[0], POINTER), "seq_cst", 1, typ=I8)
        return builder.zext(read, I64)

    return types.int64(types.int64), code


@intrinsic
def swap_byte(typing: Any, where: Any, value: Any) -> Any:
    """Writes the byte at an address; returns what was there."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where, value = arguments
        before = builder.atomic_rmw("xchg", builder.inttoptr(where, POINTER), builder.trunc(value, I8), "seq_cst")
        return builder.zext(before, I64)

    return types.int64(types.int64, types.int64), code


@intrinsic
def pause(typing: Any) -> Any:
    """A hint that this thread spins."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        module, name = builder.module, "llvm.x86.sse2.pause"
        fn = module.globals.get(name) or ir.Function(module, ir.FunctionType(ir.VoidType(), []), name)
        builder.call(fn, [])
        return context.get_dummy_value()

    return types.void(), code


@intrinsic
def word(typing: Any, where: Any) -> Any:
    """The int64 at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Lanes(builder).load(arguments[0], I64, 8)

    return types.int64(types.int64), code


@intrinsic
def real(typing: Any, where: Any) -> Any:
    """The float32 at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Lanes(builder).load(arguments[0], F32)

    return types.float32(types.int64), code


@intrinsic
def set_real(typing: Any, where: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Lanes(builder).store(arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), code
