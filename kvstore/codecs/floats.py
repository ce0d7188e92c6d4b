"""KV elements as float32 and back: bfloat16 by its bits, since numpy has no such type. Rounds to nearest, ties to even."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout

Floats = NDArray[np.float32]


def to_floats(layout: KVLayout, data: NDArray[np.uint8]) -> Floats:
    """A full layer slice as float32 [planes, block_tokens * head_dim]."""
    rows = layout.planes
    match layout.dtype:
        case "float32":
            return data.view("<f4").reshape(rows, -1)
        case "float16":
            return data.view("<f2").astype(np.float32).reshape(rows, -1)
    wide = data.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32).reshape(rows, -1)


def from_floats(layout: KVLayout, values: Floats, into: NDArray[np.uint8]) -> None:
    """The inverse of ``to_floats``. ``values`` are finite, and may be overwritten."""
    flat = values.reshape(-1)
    match layout.dtype:
        case "float32":
            into.view("<f4")[:] = flat
        case "float16":
            into.view("<f2")[:] = flat
        case _:
            bits = flat.view(np.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            into.view("<u2")[:] = bits >> 16
