"""What runs in the matrix unit of a CPU (AMX): the products of ``tiles``, sixteen rows and sixteen outputs at a time.

Its eight registers hold up to 16 rows of 64 bytes each. One instruction multiplies 16 rows of 32 bf16 with the 16 outputs of
a group, whose weights for 32 inputs are 1,024 bytes side by side in packed order already; keys and values likewise. In each
place of a result it sums even and odd numbers of the 32 apart, in float32, and then adds both. Zeros are exact, so these bits
do not depend on company, either; they are not those of ``vdpbf16ps``, and a model computes all of its products in one way.

How many rows a register has is set once for a step (``configure``). Of a tile with fewer rows of numbers the rest is computed
and dropped: up to 15 rows behind the last one are read, and have to be memory of this process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from moonpool.engine.compiled.cpu import has_matrix_unit
from moonpool.engine.compiled.lanes import I8, Lanes, words

HAS_MATRIX_UNIT = has_matrix_unit()  # a constant of what numba compiles: other CPUs do not have its instructions
TILE_ROWS = 16  # of a register, at most
TILE_INPUTS = 32  # bf16 in one of its rows
SHAPE_BYTES = 64  # of what ``configure`` reads
SCRATCH_BYTES = 2 * TILE_ROWS * 4 * 64  # of one tile of a product: [32, 64] float32

_I64 = types.int64
_RESULTS = 4  # registers 0 to 3; then those of rows, then those of weights
_REGISTERS = 8
_LINE, _BLOCK = 64, 1024  # bytes of 16 outputs for two inputs, and for 32
_AHEAD = 2048  # bytes: how far weights that come from memory are asked for in advance


def shapes() -> NDArray[np.uint8]:
    """[17, SHAPE_BYTES]: line n is a shape of registers for tiles of n rows; register 5 serves both as rows and as weights."""
    out = np.zeros((TILE_ROWS + 1, SHAPE_BYTES), np.uint8)
    for rows in range(1, TILE_ROWS + 1):
        out[rows, 0] = 1  # the only palette there is
        out[rows, 16 : 16 + 2 * _REGISTERS].view(np.uint16)[:] = _LINE
        out[rows, 48 : 48 + _RESULTS + 1] = rows
        out[rows, 48 + _RESULTS + 1 : 48 + _REGISTERS] = TILE_ROWS
    return out


class _Unit:
    """Emits instructions of the matrix unit; registers are numbers that are known when code is made."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def load(self, register: int, address: Any, stride: Any) -> None:
        self._call("tileloadd64", self._number(register), self._lanes.pointer(address), stride)

    def store(self, register: int, address: Any, stride: Any) -> None:
        self._call("tilestored64", self._number(register), self._lanes.pointer(address), stride)

    def clear(self, register: int) -> None:
        self._call("tilezero", self._number(register))

    def multiply(self, result: int, rows: int, weights: int) -> None:
        """result += rows * weights."""
        self._call("tdpbf16ps", self._number(result), self._number(rows), self._number(weights))

    def configure(self, address: Any) -> None:
        self._call("ldtilecfg", self._lanes.pointer(address))

    def release(self) -> None:
        self._call("tilerelease")

    def _call(self, name: str, *values: Any) -> None:
        function = self._lanes.function(f"llvm.x86.{name}", ir.VoidType(), [v.type for v in values])
        self._lanes.builder.call(function, list(values))

    @staticmethod
    def _number(register: int) -> ir.Constant:
        return ir.Constant(I8, register)


def _rows_at(r: int) -> int:
    return _RESULTS + r


def _weights_at(rows: int, group: int) -> int:
    """Where weights of ``group`` go beside ``rows`` registers of rows: one loads while another is multiplied."""
    first = _RESULTS + rows
    return first + group % (_REGISTERS - first)


@intrinsic
def configure(typing: Any, shape: Any) -> Any:
    """Give this thread's registers the shape at an address; half a microsecond. Until ``release``."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _Unit(Lanes(builder)).configure(arguments[0])
        return context.get_dummy_value()

    return types.void(_I64), code


@intrinsic
def release(typing: Any) -> Any:
    """This thread has no use for the unit any more: the kernel need not keep its registers, 8 KiB."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _Unit(Lanes(builder)).release()
        return context.get_dummy_value()

    return types.void(), code


def product(rows: int, groups: int) -> Any:
    """Outputs of ``groups`` * 16 packed rows of weights for ``rows`` tiles of activations, in float32; at most 4 results.

    tile(weights, x, x_stride, inputs, bias, out, out_stride): addresses, strides in bytes. ``inputs`` is a multiple of 32. Two
    tiles of rows want registers of 16 rows.
    """

    @intrinsic
    def tile(typing: Any, weights: Any, x: Any, x_stride: Any, inputs: Any, bias: Any, out: Any, out_stride: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, x, x_stride, inputs, bias, out, out_stride = arguments
            v = Lanes(builder)
            unit, line, still = _Unit(v), words(_LINE), words(0)
            streams = [v.at(weights, v.times(inputs, 32 * g)) for g in range(groups)]
            starts = [v.at(x, v.times(x_stride, TILE_ROWS * r)) for r in range(rows)]
            for g in range(groups):
                for r in range(rows):
                    unit.load(r * groups + g, v.at(bias, _LINE * g), still)  # the same line for every row
            with v.loop(builder.udiv(inputs, words(TILE_INPUTS))) as turn:
                here, there = v.times(turn.index, 2 * TILE_INPUTS), v.times(turn.index, _BLOCK)
                for r in range(rows):
                    unit.load(_rows_at(r), v.at(starts[r], here), x_stride)
                for g, stream in enumerate(streams):
                    if rows == 1:
                        for i in range(0, _BLOCK, _LINE):
                            v.prefetch(v.at(stream, there, _AHEAD + i), near=2)
                    unit.load(_weights_at(rows, g), v.at(stream, there), line)
                    for r in range(rows):
                        unit.multiply(r * groups + g, _rows_at(r), _weights_at(rows, g))
            for r in range(rows):
                for g in range(groups):
                    unit.store(r * groups + g, v.at(out, v.times(out_stride, TILE_ROWS * r), _LINE * g), out_stride)
            return context.get_dummy_value()

        return types.void(*[_I64] * 7), code

    return tile


def scores(rows: int) -> Any:
    """Dot products of ``rows`` tiles of queries with the keys of two transposed tiles.

    tile(queries, keys, head_dim, out, out_stride): queries bf16 [rows * 16][head_dim], out float32.
    ``head_dim`` is a multiple of 32.
    """

    @intrinsic
    def tile(typing: Any, queries: Any, keys: Any, head_dim: Any, out: Any, out_stride: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            queries, keys, head_dim, out, out_stride = arguments
            v = Lanes(builder)
            unit, line, stride = _Unit(v), words(_LINE), v.times(head_dim, 2)
            for register in range(2 * rows):
                unit.clear(register)
            with v.loop(builder.udiv(head_dim, words(TILE_INPUTS))) as turn:
                for r in range(rows):
                    start = v.at(queries, v.times(stride, TILE_ROWS * r), v.times(turn.index, 2 * TILE_INPUTS))
                    unit.load(_rows_at(r), start, stride)
                for t in range(2):
                    unit.load(_weights_at(rows, t), v.at(keys, v.times(head_dim, 32 * t), v.times(turn.index, _BLOCK)), line)
                    for r in range(rows):
                        unit.multiply(2 * r + t, _rows_at(r), _weights_at(rows, t))
            for r in range(rows):
                for t in range(2):
                    unit.store(2 * r + t, v.at(out, v.times(out_stride, TILE_ROWS * r), _LINE * t), out_stride)
            return context.get_dummy_value()

        return types.void(*[_I64] * 5), code

    return tile


def weighted(rows: int) -> Any:
    """Adds the values of ``turns`` * 32 tokens, weighted, to ``rows`` tiles of sums of 32 columns.

    tile(weights, weights_stride, values, values_stride, turns, out, out_stride): weights bf16, values interleaved, out float32.
    """

    @intrinsic
    def tile(typing: Any, w: Any, w_stride: Any, values: Any, v_stride: Any, turns: Any, out: Any, out_stride: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            w, w_stride, values, v_stride, turns, out, out_stride = arguments
            v = Lanes(builder)
            unit = _Unit(v)
            places = [v.at(out, v.times(out_stride, TILE_ROWS * r), _LINE * c) for r in range(rows) for c in range(2)]
            for register, place in enumerate(places):
                unit.load(register, place, out_stride)
            with v.loop(turns) as turn:
                for r in range(rows):
                    start = v.at(w, v.times(w_stride, TILE_ROWS * r), v.times(turn.index, 2 * TILE_INPUTS))
                    unit.load(_rows_at(r), start, w_stride)
                block = v.at(values, builder.mul(turn.index, v.times(v_stride, TILE_INPUTS // 2)))
                for c in range(2):
                    unit.load(_weights_at(rows, c), v.at(block, _LINE * c), v_stride)
                    for r in range(rows):
                        unit.multiply(2 * r + c, _rows_at(r), _weights_at(rows, c))
            for register, place in enumerate(places):
                unit.store(register, place, out_stride)
            return context.get_dummy_value()

        return types.void(*[_I64] * 7), code

    return tile
