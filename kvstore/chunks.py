"""Bytes of raw chunks: copied in or out, and digested while they are in the cache.

The digest is that of ``slices``: over the whole block (value, what lies between, header), seeded with key and layer 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from moonpool.core.digests import slice_seed
from moonpool.core.errors import DigestMismatch
from moonpool.kvstore.objects import CLASSES, HEADER_BYTES, Chunk

STEP = 512 << 10  # written, then digested: half of a second-level cache of today
TRAILER_BYTES = HEADER_BYTES + 8  # after a chunk's bytes of a value
_DIGEST = struct.Struct("<Q")


class Parts:
    """The bytes of one value as views that follow one another, taken from the front. No view is empty."""

    __slots__ = ("_at", "_part", "_parts")

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._part = 0
        self._at = 0

    def take(self, n: int, step: int) -> list[memoryview]:
        """The next ``n`` bytes, in views of at most ``step`` bytes."""
        out = []
        while n:
            part, at = self._parts[self._part], self._at
            end = min(at + min(n, step), len(part))
            out.append(part[at:end])
            n -= end - at
            if end == len(part):
                self._part += 1
                self._at = 0
            else:
                self._at = end
        return out


def fill(memory: memoryview, offset: int, chunk: Chunk, parts: Parts, header: bytes | None) -> None:
    """Copy a chunk's bytes into the slot at ``offset``, its header where it is the leaf, and its digest."""
    place = offset + CLASSES[chunk.size_class]
    end = place + HEADER_BYTES
    at = digested = offset
    mix = None
    for piece in parts.take(chunk.end - chunk.start, STEP):
        if at - digested >= STEP:
            mix = mix or xxhash.xxh3_64(seed=slice_seed(chunk.key, 0))
            mix.update(memory[digested:at])
            digested = at
        memory[at : at + len(piece)] = piece
        at += len(piece)
    if header is not None:
        memory[place : place + len(header)] = header
    if mix is None:
        digest = xxhash.xxh3_64_intdigest(memory[offset:end], slice_seed(chunk.key, 0))
    else:
        mix.update(memory[digested:end])
        digest = mix.intdigest()
    _DIGEST.pack_into(memory, end, digest)


def header_of(memory: memoryview, offset: int, size_class: int) -> bytes:
    """A private copy of a leaf's header, not verified yet."""
    at = offset + CLASSES[size_class]
    return bytes(memory[at : at + HEADER_BYTES])


def read(memory: memoryview, offset: int, chunk: Chunk, parts: Parts, header: bytes | None) -> None:
    """Copy a chunk out into ``parts``, then verify the private copy (and ``header``, where it is the leaf).

    DigestMismatch: the bytes are not those of ``chunk.key``.
    """
    size = chunk.end - chunk.start
    place = offset + CLASSES[chunk.size_class]
    digest = _DIGEST.unpack_from(memory, place + HEADER_BYTES)[0]
    mix = xxhash.xxh3_64(seed=slice_seed(chunk.key, 0))
    at = offset
    for piece in parts.take(size, size):
        end = at + len(piece)
        piece[:] = memory[at:end]
        mix.update(piece)
        at = end
    if header is None:
        mix.update(memory[at : place + HEADER_BYTES])
    else:
        if at < place:
            mix.update(memory[at:place])
        mix.update(header)
    if mix.intdigest() != digest:
        raise DigestMismatch(f"chunk {chunk.key.hex()} differs from its digest; the value is a miss")
