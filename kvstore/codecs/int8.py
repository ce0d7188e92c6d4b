"""Eight-bit integers: every value of a head within half of 1/127 of that head's largest magnitude."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.kvstore.codecs import scaled
from moonpool.kvstore.codecs.codec import Bytes
from moonpool.kvstore.codecs.floats import Floats

LARGEST = 127


class Int8:
    name = "int8"
    lossy = True

    def encode(self, layout: KVLayout, full: Bytes, into: Bytes) -> bool:
        return scaled.encode(layout, full, into, LARGEST, _quantise)

    def decode(self, layout: KVLayout, coded: Bytes, into: Bytes) -> None:
        scaled.decode(layout, coded, into, _expand)


def _quantise(values: Floats) -> NDArray[np.uint8]:
    return np.clip(np.rint(values, out=values), -LARGEST, LARGEST).astype(np.int8).view(np.uint8)


def _expand(codes: NDArray[np.uint8]) -> Floats:
    return codes.view(np.int8).astype(np.float32)
