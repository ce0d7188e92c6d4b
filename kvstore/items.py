"""What one call of the library puts: values cut into chunks, and blocks of KV."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.kvstore import chunks, slices, values
from moonpool.kvstore.objects import CLASSES, encode_header, plan
from moonpool.wire.host_frames import Link, Wanted


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

    def write(self, index: int, memory: memoryview, offset: int) -> None:
        """Block ``index`` with its digests into the slot at ``offset`` of a region. In order, each once."""


class ValueItem:
    """``nonce`` names the chunks of this put; values of one chunk need none."""

    __slots__ = ("_chunks", "_header", "_parts", "bytes", "put", "wanted")

    def __init__(self, key: bytes, value: Any, nonce: bytes) -> None:
        shape, views = values.to_parts(value)
        self.put = Put.LOST
        self.bytes = shape.size
        self._chunks = plan(key, nonce, shape.size)
        self._parts = chunks.Parts(views)
        self._header = encode_header(shape, nonce)
        self.wanted: Sequence[Wanted]
        if len(self._chunks) == 1:
            self.wanted = [Wanted(key, self._chunks[0].size_class, Link.NONE)]
        else:
            links = [Link.NONE, *[Link.TIED] * (len(self._chunks) - 1)]
            self.wanted = [Wanted(one.key, one.size_class, link) for one, link in zip(self._chunks, links, strict=True)]

    def slot_bytes(self, index: int) -> int:
        return CLASSES[self._chunks[index].size_class] + chunks.TRAILER_BYTES

    def write(self, index: int, memory: memoryview, offset: int) -> None:
        header = self._header if index == len(self._chunks) - 1 else None
        chunks.fill(memory, offset, self._chunks[index], self._parts, header)


class BlockItem:
    """One [block_bytes] block of KV; ``number`` is the store node's for ``layout``."""

    __slots__ = ("_block", "_key", "_layout", "bytes", "put", "wanted")

    def __init__(self, layout: KVLayout, number: int, key: bytes, block: NDArray[np.uint8], link: Link) -> None:
        self.put = Put.LOST
        self.bytes = layout.block_bytes
        self.wanted: Sequence[Wanted] = [Wanted(key, number, link)]
        self._layout, self._key, self._block = layout, key, block

    def slot_bytes(self, index: int) -> int:
        return self._layout.slot_bytes

    def write(self, index: int, memory: memoryview, offset: int) -> None:
        slices.fill(self._layout, np.frombuffer(memory, dtype=np.uint8), offset, self._key, self._block)
