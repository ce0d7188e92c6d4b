"""Bytes of slots: where a slice and its digest lie, and the checks on them. Called from copy, verify and compute threads.

A slot holds ``layers`` slices one after the other, then one little-endian u64 digest per layer (the trailer).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moonpool.core.digests import slice_digest
from moonpool.core.errors import DigestMismatch
from moonpool.core.layout import DIGEST_BYTES, KVLayout

Bytes = NDArray[np.uint8]


def slice_of(layout: KVLayout, region: Bytes, offset: int, layer: int) -> Bytes:
    """[slice_bytes] view of one layer of the slot at ``offset``."""
    start = offset + layer * layout.slice_bytes
    return region[start : start + layout.slice_bytes]


def slot_of(layout: KVLayout, region: Bytes, offset: int) -> Bytes:
    """[slot_bytes] view of the slot, trailer included."""
    return region[offset : offset + layout.slot_bytes]


def trailer_of(layout: KVLayout, region: Bytes, offset: int) -> NDArray[np.uint64]:
    """[layers] view of the slot's digests."""
    start = offset + layout.block_bytes
    return region[start : start + layout.layers * DIGEST_BYTES].view("<u8")


def zero_rest(layout: KVLayout, data: Bytes, valid: int) -> None:
    """Zero the tokens of a [slice_bytes] slice from ``valid`` on."""
    if valid < layout.block_tokens:
        data.reshape(layout.planes, layout.block_tokens * layout.row_bytes)[:, valid * layout.row_bytes :] = 0


def is_right(layout: KVLayout, region: Bytes, offset: int, layer: int, key: bytes, valid: int, digest: int) -> bool:
    """Whether the slice that lies there is what its sender announced. Reads only."""
    return slice_digest(layout, slice_of(layout, region, offset, layer), key, layer, valid) == digest


def mark(layout: KVLayout, region: Bytes, offset: int, layer: int, valid: int, digest: int) -> None:
    """Note a verified slice's digest in the trailer, and zero the tokens it leaves empty. Cheap: whole blocks zero nothing."""
    zero_rest(layout, slice_of(layout, region, offset, layer), valid)
    trailer_of(layout, region, offset)[layer] = digest


def fill(layout: KVLayout, region: Bytes, offset: int, key: bytes, block: Bytes) -> None:
    """Copy a whole [block_bytes] block into a slot, and the digests of the copy into its trailer."""
    region[offset : offset + layout.block_bytes] = block
    trailer = trailer_of(layout, region, offset)
    for layer in range(layout.layers):
        trailer[layer] = slice_digest(layout, slice_of(layout, region, offset, layer), key, layer, layout.block_tokens)


def read(layout: KVLayout, region: Bytes, offset: int, layer: int, key: bytes, valid: int, into: Bytes) -> None:
    """Copy one slice into the private ``into`` [slice_bytes], then verify the copy against the slot's trailer.

    DigestMismatch: the bytes are not those of (key, layer). Tokens from ``valid`` on are zero in the copy.
    """
    digest = int(trailer_of(layout, region, offset)[layer])
    into[:] = slice_of(layout, region, offset, layer)
    if slice_digest(layout, into, key, layer, valid) != digest:
        raise DigestMismatch(f"layer {layer} of block {key.hex()} differs from its digest; the block is recomputed")
    zero_rest(layout, into, valid)


def is_whole(layout: KVLayout, region: Bytes, offset: int, key: bytes) -> bool:
    """Whether every layer of a sealed slot agrees with its trailer."""
    digests = trailer_of(layout, region, offset)
    return all(
        slice_digest(layout, slice_of(layout, region, offset, layer), key, layer, layout.block_tokens) == int(digests[layer])
        for layer in range(layout.layers)
    )
