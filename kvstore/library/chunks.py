"""Bytes of blocks on their way into slots and out of them, each digested while it is in the cache.

What is to be done is worked out first, for many blocks (``Fill``, ``Read``), and then done in one tight loop: a copy of
a megabyte sweeps the interpreter out of the cache, so whatever Python does between two copies costs several times as much.

The digests are those of ``slices``. That of a raw chunk covers its block: header, value, what lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from moonpool.core.digests import slice_seed
from moonpool.core.layout import DIGEST_BYTES
from moonpool.kvstore.library.objects import CLASSES, HEADER_BYTES, Chunk

STEP = 256 << 10  # copied, then digested
Copies = Sequence[tuple[memoryview, memoryview]]
"""(target, source), of one size each."""


class Fill(NamedTuple):
    """Copy into a slot; the digest of ``before``, of what was copied, and of ``after`` goes into ``digest`` (8 bytes)."""

    before: memoryview | bytes
    copies: Copies
    after: memoryview | bytes
    seed: int
    digest: memoryview


class Read(NamedTuple):
    """Copy out of a slot; ``before``, what was copied, and ``after`` shall have ``digest`` together."""

    before: memoryview | bytes
    copies: Copies
    after: memoryview | bytes
    seed: int
    digest: int


class Parts:
    """The bytes of one value as views that follow one another, taken from the front. No view is empty."""

    __slots__ = ("_at", "_part", "_parts")

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._part = 0
        self._at = 0

    def take(self, n: int) -> list[memoryview]:
        """The next ``n`` bytes, in views of at most ``STEP``."""
        parts, number, at = self._parts, self._part, self._at
        out = []
        while n:
            part = parts[number]
            size = len(part)
            if not at and size <= n and size <= STEP:
                out.append(part)
                n -= size
                number += 1
                continue
            end = min(at + min(n, STEP), size)
            out.append(part[at:end])
            n -= end - at
            number, at = (number + 1, 0) if end == size else (number, end)
        self._part, self._at = number, at
        return out


def fill_chunk(memory: memoryview, offset: int, chunk: Chunk, parts: Parts, header: bytes | None) -> Fill:
    """How a chunk gets into the slot at ``offset``; its ``header``, where it is the leaf, is written at once."""
    if header is not None:
        memory[offset : offset + len(header)] = header
    begun = at = offset + HEADER_BYTES
    end = at + CLASSES[chunk.size_class]
    copies = []
    for part in parts.take(chunk.end - chunk.start):
        to = at + len(part)
        copies.append((memory[at:to], part))
        at = to
    digest = memory[end : end + DIGEST_BYTES]
    return Fill(memory[offset:begun], copies, memory[at:end], slice_seed(chunk.key, 0), digest)


def fill(fills: Iterable[Fill]) -> None:
    """What is digested is the caller's own bytes: if they change meanwhile, no reader takes the mixture for a value."""
    make = xxhash.xxh3_64
    for before, copies, after, seed, digest in fills:
        mix = make(before, seed=seed)
        for target, source in copies:
            target[:] = source
            mix.update(source)
        mix.update(after)
        digest[:] = mix.intdigest().to_bytes(DIGEST_BYTES, "little")


def header_of(memory: memoryview, offset: int) -> bytes:
    """A private copy of a leaf's header, not verified yet."""
    return bytes(memory[offset : offset + HEADER_BYTES])


def read_chunk(memory: memoryview, offset: int, chunk: Chunk, parts: Parts, header: bytes | None) -> Read:
    """How a chunk gets out of the slot at ``offset``; ``header`` is the private copy of the leaf's."""
    at = offset + HEADER_BYTES
    end = at + CLASSES[chunk.size_class]
    before = memory[offset:at] if header is None else header
    copies = []
    for part in parts.take(chunk.end - chunk.start):
        to = at + len(part)
        copies.append((part, memory[at:to]))
        at = to
    digest = int.from_bytes(memory[end : end + DIGEST_BYTES], "little")
    return Read(before, copies, memory[at:end], slice_seed(chunk.key, 0), digest)


def read(reads: Iterable[Read]) -> list[bool]:
    """Whether each private copy has its digest."""
    out, make = [], xxhash.xxh3_64
    for before, copies, after, seed, digest in reads:
        mix = make(before, seed=seed)
        for target, source in copies:
            target[:] = source
            mix.update(target)
        mix.update(after)
        out.append(mix.intdigest() == digest)
    return out
