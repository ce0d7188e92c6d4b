"""What one call of the library puts: values cut into chunks, and blocks of KV."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.core.digests import slice_seed
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore.library import chunks, values
from moonpool.kvstore.library.chunks import Fill
from moonpool.kvstore.library.objects import CHUNK, CLASSES, NONCE_BYTES, SLOT_MORE, Shape, encode_header, plan
from moonpool.wire.host_frames import Link, Wanted

NO_NONCE = bytes(NONCE_BYTES)


class Put(StrEnum):
    """What became of a value."""

    STORED = "stored"
    THERE = "there"  # a value of this key is here already, and stays
    COMING = "coming"  # somebody else is writing one
    NO_ROOM = "no_room"  # and nothing that could be evicted
    NO_PARENT = "no_parent"  # the block before it is not here: it would never be found
    LOST = "lost"  # somebody else's was first, or the store node gave this one up


class Item(Protocol):
    """Blocks that are stored together or not at all; ``put`` is the outcome."""

    wanted: Sequence[Wanted]
    bytes: int
    put: Put

    def slot_bytes(self, index: int) -> int:
        """Of the slot that block ``index`` needs."""

    def fills(self, index: int, memory: memoryview, offset: int) -> Sequence[Fill]:
        """How block ``index`` gets into the slot at ``offset`` of a region. Asked in order, for each block once."""


class ValueItem:
    """``nonce`` names the chunks of this put; values of one chunk need none. ``headers`` are those made before."""

    __slots__ = ("_chunks", "_header", "_parts", "bytes", "put", "wanted")

    def __init__(self, key: bytes, value: Any, nonce: int, headers: dict[Shape, bytes]) -> None:
        shape, views = values.to_parts(value)
        self.put = Put.LOST
        self.bytes = shape.size
        self._parts = chunks.Parts(views)
        self.wanted: Sequence[Wanted]
        if shape.size <= CHUNK:
            self._chunks = plan(key, NO_NONCE, shape.size)
            self.wanted = (Wanted(key, self._chunks[0].size_class, Link.NONE),)
            header = headers.get(shape)
            if header is None:
                header = headers[shape] = encode_header(shape, NO_NONCE)
            self._header = header
        else:
            mine = nonce.to_bytes(NONCE_BYTES)
            self._chunks = plan(key, mine, shape.size)
            links = [Link.NONE, *[Link.TIED] * (len(self._chunks) - 1)]
            self.wanted = [Wanted(one.key, one.size_class, link) for one, link in zip(self._chunks, links, strict=True)]
            self._header = encode_header(shape, mine)

    def slot_bytes(self, index: int) -> int:
        return CLASSES[self._chunks[index].size_class] + SLOT_MORE

    def fills(self, index: int, memory: memoryview, offset: int) -> Sequence[Fill]:
        header = self._header if index == len(self._chunks) - 1 else None
        return (chunks.fill_chunk(memory, offset, self._chunks[index], self._parts, header),)


class BlockItem:
    """One [block_bytes] block of KV; ``number`` is the store node's for ``layout``."""

    __slots__ = ("_block", "_key", "_layout", "bytes", "put", "wanted")

    def __init__(self, layout: KVLayout, number: int, key: bytes, block: NDArray[np.uint8], link: Link) -> None:
        self.put = Put.LOST
        self.bytes = layout.block_bytes
        self.wanted: Sequence[Wanted] = (Wanted(key, number, link),)
        self._layout, self._key, self._block = layout, key, block

    def slot_bytes(self, index: int) -> int:
        return self._layout.slot_bytes

    def fills(self, index: int, memory: memoryview, offset: int) -> Sequence[Fill]:
        """Layer by layer, each digested while it is in the cache."""
        layout, size = self._layout, self._layout.slice_bytes
        out, digests = [], offset + layout.block_bytes
        for layer in range(layout.layers):
            start, at = layer * size, digests + layer * DIGEST_BYTES
            target = memory[offset + start : offset + start + size]
            copies = ((target, self._block.data[start : start + size]),)
            out.append(Fill(b"", copies, b"", slice_seed(self._key, layer), memory[at : at + DIGEST_BYTES]))
        return out
