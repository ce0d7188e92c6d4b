"""Eight-bit floats, e4m3: every normal value within 1/16 of itself, and small values of a head keep their digits.

The format of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): bias 7, largest value 448, no infinities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.kvstore.codecs import scaled
from moonpool.kvstore.codecs.codec import Bytes
from moonpool.kvstore.codecs.floats import Floats

LARGEST = 448.0
SMALLEST_NORMAL = np.float32(2.0**-6)
STEP = 2.0**9  # subnormal values are multiples of 1 / STEP


class Fp8:
    name = "fp8"
    lossy = True

    def __init__(self) -> None:
        self._values = _table()

    def encode(self, layout: KVLayout, full: Bytes, into: Bytes) -> bool:
        return scaled.encode(layout, full, into, LARGEST, _quantise)

    def decode(self, layout: KVLayout, coded: Bytes, into: Bytes) -> None:
        scaled.decode(layout, coded, into, lambda codes: self._values[codes])


def _table() -> Floats:
    """The value of each of the 256 codes; the two that are no number are 0, and never written."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / STEP, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[code & 127 == 127] = 0
    return np.where(code > 127, -size, size).astype(np.float32)


def _quantise(values: Floats) -> NDArray[np.uint8]:
    """Values up to ``LARGEST``, give or take a float32's last digit: to nearest, ties to even.

    Rounding the bits may carry into the exponent, which is right.
    """
    bits = values.view(np.uint32)
    sign = (bits >> 24).astype(np.uint8) & np.uint8(0x80)
    size = np.abs(values)
    raw = size.view(np.uint32)
    codes = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - (120 << 3)  # float32 has bias 127, and 20 bits more
    small = np.rint(size * np.float32(STEP)).astype(np.uint32)
    sign |= np.where(size < SMALLEST_NORMAL, small, codes).astype(np.uint8)
    return sign
