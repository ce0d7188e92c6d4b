"""Blocks to and from one segment file, digests checked on the way. Called from the tier's threads; raises nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from moonpool.core.digests import slice_digest
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore import slices
from moonpool.kvstore.ssd.blocks import ReadEnd, Write
from moonpool.kvstore.ssd.files import Bytes, SegmentFile, aligned
from moonpool.kvstore.ssd.format import (
    HEADER_BYTES,
    ExtentHeader,
    decode_extent,
    encode_digests,
    encode_extent,
    extent_bytes,
    offset_of,
)

LONGEST = 64  # extents in one system call; each takes two of its 1,024 buffers


class Fault(StrEnum):
    """What a system call said about the segment file."""

    NONE = "none"
    ERROR = "error"  # EIO, ENOSPC, a short write
    VANISHED = "vanished"  # removed or cut behind our back


class WriteEnd(StrEnum):
    OK = "ok"
    FAILED = "failed"
    MISMATCH = "mismatch"  # the slot in memory differs from its own digests


@dataclass(frozen=True)
class Place:
    """A run of extents side by side in one segment. ``epoch`` is that of the segment's life."""

    file: SegmentFile
    layout: KVLayout
    epoch: int
    first: int  # position
    count: int

    @property
    def offset(self) -> int:
        return offset_of(self.first, self.layout)

    @property
    def size(self) -> int:
        return self.count * extent_bytes(self.layout)


@dataclass
class Scratch:
    """One thread's page-aligned memory, used again for every call."""

    headers: Bytes = field(default_factory=lambda: aligned(LONGEST * HEADER_BYTES))
    memory: Bytes = field(default_factory=lambda: aligned(HEADER_BYTES))

    def header(self, i: int) -> Bytes:
        return self.headers[i * HEADER_BYTES : (i + 1) * HEADER_BYTES]

    def slots(self, n: int, size: int) -> list[Bytes]:
        """``n`` [size] pieces; whole pages each."""
        if self.memory.size < n * size:
            self.memory = aligned(n * size)
        return [self.memory[i * size : (i + 1) * size] for i in range(n)]

    def buffers(self, slots: Sequence[Bytes]) -> list[Bytes]:
        out: list[Bytes] = []
        for i, slot in enumerate(slots):
            out += (self.header(i), slot)
        return out


def is_block(layout: KVLayout, slot: Bytes, key: bytes, digests: Sequence[int]) -> bool:
    """Whether every slice of the [slot_bytes] slot is (key, layer)'s and the trailer says the same."""
    if len(digests) != layout.layers:
        return False
    end = layout.block_bytes + layout.layers * DIGEST_BYTES
    if slot[layout.block_bytes : end].tobytes() != encode_digests(digests):
        return False
    return all(
        slice_digest(layout, slices.slice_of(layout, slot, 0, layer), key, layer, layout.block_tokens) == digest
        for layer, digest in enumerate(digests)
    )


def write_run(
    place: Place, blocks: Sequence[Write], sequence: Callable[[], int], scratch: Scratch
) -> tuple[list[WriteEnd], Fault]:
    """Check and write ``blocks`` in one call. A wrong one fails alone; its neighbours are written in further calls."""
    layout = place.layout
    ends = [WriteEnd.OK] * len(blocks)
    for i, block in enumerate(blocks):
        digests = tuple(int(d) for d in slices.trailer_of(layout, block.data, 0))
        if not is_block(layout, block.data, block.key, digests):
            ends[i] = WriteEnd.MISMATCH
            continue
        header = ExtentHeader(
            place.file.number,
            place.first + i,
            place.epoch,
            sequence(),
            layout.fingerprint,
            block.key,
            block.parent,
            block.use,
            digests,
        )
        scratch.header(i)[:] = np.frombuffer(encode_extent(header), dtype=np.uint8)
    fault = Fault.NONE
    if not place.file.intact():
        return [WriteEnd.FAILED] * len(blocks), Fault.VANISHED
    for start, end in _stretches(ends):
        try:
            part = [(scratch.header(i), blocks[i].data) for i in range(start, end)]
            place.file.write([b for pair in part for b in pair], place.offset + start * extent_bytes(layout))
        except OSError:
            ends[start:end] = [WriteEnd.FAILED] * (end - start)
            fault = Fault.ERROR
    return ends, fault


def _stretches(ends: Sequence[WriteEnd]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for i, end in enumerate(ends):
        if end is not WriteEnd.OK:
            continue
        if out and out[-1][1] == i:
            out[-1] = (out[-1][0], i + 1)
        else:
            out.append((i, i + 1))
    return out


def read_run(place: Place, into: Sequence[Bytes], scratch: Scratch) -> tuple[list[tuple[ReadEnd, ExtentHeader | None]], Fault]:
    """Read whole extents in one call and check each. Their headers are returned; the caller compares the keys.

    What lies past the trailer of a slot is covered by no digest: it is zeroed here, so nobody ever reads it.
    """
    if not place.file.intact():
        return [(ReadEnd.GONE, None)] * len(into), Fault.VANISHED
    one = extent_bytes(place.layout)
    try:
        done = place.file.read(scratch.buffers(into), place.offset)
    except OSError:
        if len(into) > 1:
            return _one_by_one(place, into, scratch)
        return [(ReadEnd.GONE, None)], Fault.ERROR
    whole = done // one
    ends = [_checked(place, i, slot, scratch) for i, slot in enumerate(into[:whole])]
    if whole == len(into):
        return ends, Fault.NONE
    return ends + [(ReadEnd.GONE, None)] * (len(into) - whole), Fault.ERROR if place.file.intact() else Fault.VANISHED


@dataclass
class Moved:
    """``targets[i]`` is where the i-th block lies now, (place, position); None where it could not be moved."""

    ends: list[ReadEnd]
    targets: list[tuple[Place, int] | None]
    read_fault: Fault
    write_faults: list[Fault]  # by target place


def move_run(source: Place, targets: Sequence[Place], sequence: Callable[[], int], scratch: Scratch) -> Moved:
    """Copy a run of extents, each checked, to ``targets``, which together have as many. Headers say their new places."""
    layout = source.layout
    slots = scratch.slots(source.count, layout.slot_bytes)
    found, read_fault = read_run(source, slots, scratch)
    moved = Moved([end for end, _ in found], [], read_fault, [])
    at = 0
    for place in targets:
        mine = range(at, at + place.count)
        at += place.count
        where: list[tuple[Place, int] | None] = [None] * place.count
        fault = Fault.NONE if place.file.intact() else Fault.VANISHED
        for i in mine:
            end, header = found[i]
            if fault is not Fault.NONE or end is not ReadEnd.OK or header is None:
                continue
            position = place.first + i - mine.start
            new = replace(header, segment=place.file.number, position=position, epoch=place.epoch, sequence=sequence())
            scratch.header(i)[:] = np.frombuffer(encode_extent(new), dtype=np.uint8)
            try:
                place.file.write([scratch.header(i), slots[i]], offset_of(position, layout))
                where[i - mine.start] = (place, position)
            except OSError:
                fault = Fault.ERROR
        moved.targets += where
        moved.write_faults.append(fault)
    return moved


def _one_by_one(
    place: Place, into: Sequence[Bytes], scratch: Scratch
) -> tuple[list[tuple[ReadEnd, ExtentHeader | None]], Fault]:
    """One bad place on the disk must not cost its neighbours."""
    ends: list[tuple[ReadEnd, ExtentHeader | None]] = []
    fault = Fault.NONE
    for i, slot in enumerate(into):
        single = Place(place.file, place.layout, place.epoch, place.first + i, 1)
        end, worse = read_run(single, [slot], scratch)
        ends += end
        fault = fault if worse is Fault.NONE else worse
    return ends, fault


def _checked(place: Place, i: int, slot: Bytes, scratch: Scratch) -> tuple[ReadEnd, ExtentHeader | None]:
    layout = place.layout
    header = decode_extent(scratch.header(i).tobytes())
    if header is None or not belongs(header, place, place.first + i):
        return ReadEnd.TORN, None
    if not is_block(layout, slot, header.key, header.digests):
        return ReadEnd.TORN, header
    slot[layout.block_bytes + layout.layers * DIGEST_BYTES :] = 0
    return ReadEnd.OK, header


def belongs(header: ExtentHeader, place: Place, position: int) -> bool:
    """Whether the header was written for this very extent in this life of the segment."""
    return (
        header.segment == place.file.number
        and header.position == position
        and header.epoch == place.epoch
        and header.layout == place.layout.fingerprint
    )
