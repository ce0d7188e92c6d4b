"""The one native loop of ranks that meet in shared memory: words that only count up, spun on for a while."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from moonpool.engine import kernel_cache
from moonpool.engine.paged_numbers import fetch_add

LINE_WORDS = 8  # of 8 bytes, from one word to the next: a cache line each


class Waits(NamedTuple):
    """Neither holds the interpreter's lock."""

    all_at: Callable[[int, int, int, int], bool]
    """``all_at(words, count, value, spins)``: whether all ``count`` words from address ``words`` on are ``value`` or more."""
    step_up: Callable[[int], int]
    """``step_up(word)``: one more in the word at that address, and what it is now. What was written before is seen by then."""


@intrinsic  # type: ignore[untyped-decorator]
def _loaded(typing: Any, address: Any) -> Any:
    """The int64 at ``address``. What others wrote before their own ``fetch_add`` is seen after it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        cell = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(cell, "acquire", 8)

    return types.int64(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def _pause(typing: Any) -> Any:
    """Let the other hardware thread of this core go first, where the CPU has a word for that."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            hint = builder.module.declare_intrinsic("llvm.x86.sse2.pause", [], ir.FunctionType(ir.VoidType(), []))
            builder.call(hint, [])
        return context.get_dummy_value()

    return types.void(), build


def _all_at(words: Any, count: Any, value: Any, spins: Any) -> Any:
    for _ in range(spins):
        here = 0
        while here < count and _loaded(words + 8 * LINE_WORDS * here) >= value:
            here += 1
        if here == count:
            return True
        _pause()
    return False


def _step_up(word: Any) -> Any:
    return fetch_add(word, 1) + 1


@cache
def waits() -> Waits:
    """Compiled, or loaded, by the first call: what a worker without further ranks imports is to compile nothing."""
    all_at = njit(types.boolean(types.int64, types.int64, types.int64, types.int64), nogil=True, cache=True)
    step_up = njit(types.int64(types.int64), nogil=True, cache=True)
    with kernel_cache.compiling():
        return Waits(all_at(_all_at), step_up(_step_up))
