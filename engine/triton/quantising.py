"""Rows in eight bits with a power of two each, as ``engine.quantised`` defines them, inside kernels.

Rounding is spelled out, to nearest and ties to even, so that the conversions themselves are exact: they round differently from
device to device, and in the interpreter wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scales_of(exponents):
    """float32, shaped as ``exponents``."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponents_of(tile, KIND: tl.constexpr):
    """int32 [rows] for ``tile`` float32 [rows, columns]. By the bits: an integer maximum sees NaN, too."""
    bits = tl.max(tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if KIND == "int8":
        above = (bits & 0x7FFFFF) > 0x7E0000
        found = (bits >> 23) - 6 + above.to(tl.int32)
    else:
        above = (bits & 0x7FFFFF) > 0x680000
        found = (bits >> 23) - 8 + above.to(tl.int32)
    return tl.where(bits >= 0x7F800000, 255, tl.maximum(found, 16))


@triton.jit
def quantised(tile, exponents, KIND: tl.constexpr):
    """float32 [rows, columns] whose values the eight bits hold exactly."""
    broken = exponents == 255
    inverse = ((254 - tl.where(broken, 127, exponents)) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(broken[:, None], 1.0, tile) * inverse[:, None]
    if KIND == "int8":
        rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: what is added to it keeps no fraction
    else:
        within = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        bits = within.to(tl.int32, bitcast=True)
        large = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of mantissa; a carry goes into the exponent
        small = (within + 24576.0) - 24576.0  # 1.5 * 2**14: subnormal values are multiples of 2**-9
        rounded = tl.where(tl.abs(within) < 0.015625, small, large.to(tl.float32, bitcast=True))
    return rounded
