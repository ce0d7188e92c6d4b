"""Digests of layer slices, seeded with (block key, layer): a right block in the wrong place fails.

Over valid bytes only, in slice order: for a partly filled block the pieces of ``KVLayout.pieces(valid)`` one after
the other. The seed is xxh3_64 of key and layer.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout


def slice_seed(key: bytes, layer: int) -> int:
    return xxhash.xxh3_64_intdigest(key + layer.to_bytes(4, "little"))


def slice_digest(layout: KVLayout, data: NDArray[np.uint8], key: bytes, layer: int, valid: int) -> int:
    """Digest of one layer slice. ``data`` is its [slice_bytes] uint8 view; tokens past ``valid`` are not read."""
    seed = slice_seed(key, layer)
    pieces = layout.pieces(valid)
    if len(pieces) == 1:
        ((offset, length),) = pieces
        return xxhash.xxh3_64_intdigest(data[offset : offset + length].data, seed)
    mix = xxhash.xxh3_64(seed=seed)
    for offset, length in pieces:
        mix.update(data[offset : offset + length].data)
    return mix.intdigest()
