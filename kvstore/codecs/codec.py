"""How a stored block may be written smaller. Pure: bytes in, bytes out, called from threads.

An encoded block is a block of a layout of its own (``KVLayout.codec``): the same shape, with slices of another size. Its
digests are over the encoded bytes, so what is checked is what is stored, before anything is decoded. What a lossy codec
wrote is never encoded again: ``coded`` refuses a layout that has a codec.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest
from moonpool.core.layout import RAW, KVLayout

Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """``layout`` is always that of the full block; encoded slices have ``coded(layout, name).slice_bytes``."""

    name: str
    lossy: bool

    def encode(self, layout: KVLayout, full: Bytes, into: Bytes) -> bool:
        """One layer slice, [slice_bytes] to [coded slice_bytes]. False: it holds what this codec cannot carry."""
        ...

    def decode(self, layout: KVLayout, coded: Bytes, into: Bytes) -> None:
        """The inverse, as near as it gets, in canonical order."""
        ...


FLOATS = frozenset({"bfloat16", "float16", "float32"})


def can_be_coded(layout: KVLayout) -> bool:
    return layout.codec == RAW and layout.order == "canonical" and layout.dtype in FLOATS


def coded(layout: KVLayout, name: str) -> KVLayout:
    """The layout of ``layout``'s blocks as codec ``name`` writes them. InvalidRequest where it cannot write them."""
    if layout.codec != RAW:
        raise InvalidRequest(
            f"codec: the blocks are written by {layout.codec} already, and are never encoded again", param="codec"
        )
    if name != RAW and not can_be_coded(layout):
        raise InvalidRequest(
            f"codec: {name} writes floats in canonical order, not {layout.dtype} in order {layout.order!r}",
            param="codec",
        )
    return replace(layout, codec=name)


def encode(codec: Codec, layout: KVLayout, block: Bytes) -> Bytes | None:
    """A [block_bytes] block, encoded; None where a value of it is beyond the codec."""
    small = coded(layout, codec.name)
    out = np.empty(small.block_bytes, np.uint8)
    for full, into in zip(_slices(layout, block), _slices(small, out), strict=True):
        if not codec.encode(layout, full, into):
            return None
    return out


def decode(codec: Codec, layout: KVLayout, data: Bytes) -> Bytes:
    """The [block_bytes] block of ``layout`` that ``data`` encodes."""
    small = coded(layout, codec.name)
    out = np.empty(layout.block_bytes, np.uint8)
    for full, into in zip(_slices(small, data), _slices(layout, out), strict=True):
        codec.decode(layout, full, into)
    return out


def _slices(layout: KVLayout, block: Bytes) -> Bytes:
    return block[: layout.block_bytes].reshape(layout.layers, layout.slice_bytes)
