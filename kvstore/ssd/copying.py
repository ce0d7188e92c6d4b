"""Blocks to and from one segment file, digests checked on the way. Called from the tier's threads; raises nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np

from moonpool.core.digests import slice_digest
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore import slices
from moonpool.kvstore.sealing.stream import TAG_BYTES
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
RUN_BYTES = 4 << 20  # most bytes of one system call


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


def longest(layout: KVLayout, n: int, threads: int) -> int:
    """Extents in one system call where ``n`` are to be moved: few enough that every thread gets some."""
    return max(1, min(-(-n // threads), RUN_BYTES // extent_bytes(layout), LONGEST))


class Calls(Protocol):
    """How many system calls may run at once: blocks are checked outside of them, so that the disk is never idle for that."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


@dataclass
class Scratch:
    """One thread's page-aligned memory, used again for every call, and whether it counts as inside a system call."""

    calls: Calls | None = None
    inside: bool = False
    headers: Bytes = field(default_factory=lambda: aligned(LONGEST * HEADER_BYTES))
    memory: Bytes = field(default_factory=lambda: aligned(HEADER_BYTES))
    closed: Bytes = field(default_factory=lambda: aligned(HEADER_BYTES))

    def enter(self) -> None:
        """Before a system call; may wait for others to leave."""
        if self.calls is not None and not self.inside:
            self.calls.enter()
            self.inside = True

    def leave(self) -> None:
        if self.calls is not None and self.inside:
            self.inside = False
            self.calls.leave()

    def sealed(self, n: int, size: int) -> list[Bytes]:
        """``n`` [size + TAG_BYTES] pieces, page-aligned, for sealed slots of ``size`` bytes."""
        step = size + HEADER_BYTES
        if self.closed.size < n * step:
            self.closed = aligned(n * step)
        return [self.closed[i * step : i * step + size + TAG_BYTES] for i in range(n)]

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
    wanted = [True] * len(blocks)
    out = _outgoing(place, [block.data for block in blocks], scratch)
    for i, block in enumerate(blocks):
        digests = tuple(int(d) for d in slices.trailer_of(layout, block.data, 0))
        if not is_block(layout, block.data, block.key, digests):
            wanted[i] = False
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
        _close(place, header, block.data, out[i], scratch.header(i))
    if not place.file.intact():
        return [WriteEnd.FAILED] * len(blocks), Fault.VANISHED
    right = list(wanted)
    fault = _write_stretches(place, wanted, [data[: layout.slot_bytes] for data in out], scratch)
    ends = [
        WriteEnd.OK if there else WriteEnd.FAILED if ok else WriteEnd.MISMATCH for there, ok in zip(wanted, right, strict=True)
    ]
    return ends, fault


def _outgoing(place: Place, slots: Sequence[Bytes], scratch: Scratch) -> Sequence[Bytes]:
    """Where the bytes of ``slots`` are written from: from where they lie, or sealed from scratch memory."""
    return slots if place.file.vault is None else scratch.sealed(len(slots), place.layout.slot_bytes)


def _close(place: Place, header: ExtentHeader, slot: Bytes, out: Bytes, page: Bytes) -> None:
    """The header into ``page`` and, where the file is sealed, the sealed slot into ``out``."""
    vault = place.file.vault
    raw = encode_extent(header) if vault is None else vault.seal(header, slot, out)
    page[:] = np.frombuffer(raw, dtype=np.uint8)


def header_in(page: Bytes, file: SegmentFile) -> ExtentHeader | None:
    """The header in [HEADER_BYTES] of this file; None where there is none that can be read."""
    if file.vault is None:
        return decode_extent(page.tobytes())
    found = file.vault.open_header(page.tobytes())
    return None if found is None else found.header


def _stretches(wanted: Sequence[bool]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for i, one in enumerate(wanted):
        if one and out and out[-1][1] == i:
            out[-1] = (out[-1][0], i + 1)
        elif one:
            out.append((i, i + 1))
    return out


def read_run(place: Place, into: Sequence[Bytes], scratch: Scratch) -> tuple[list[tuple[ReadEnd, ExtentHeader | None]], Fault]:
    """Read whole extents in one call and check each. Their headers are returned; the caller compares the keys.

    What lies past the trailer of a slot is covered by no digest: it is zeroed here, so nobody ever reads it.
    """
    if not place.file.intact():
        return [(ReadEnd.GONE, None)] * len(into), Fault.VANISHED
    one = extent_bytes(place.layout)
    size = place.layout.slot_bytes
    closed = _outgoing(place, into, scratch)
    scratch.enter()
    try:
        done = place.file.read(scratch.buffers([data[:size] for data in closed]), place.offset)
    except OSError:
        if len(into) > 1:
            return _one_by_one(place, into, scratch)
        return [(ReadEnd.GONE, None)], Fault.ERROR
    finally:
        scratch.leave()
    whole = done // one
    ends = [_checked(place, i, closed[i], slot, scratch) for i, slot in enumerate(into[:whole])]
    if whole == len(into):
        return ends, Fault.NONE
    return ends + [(ReadEnd.GONE, None)] * (len(into) - whole), Fault.ERROR if place.file.intact() else Fault.VANISHED


@dataclass
class Moved:
    """``ends[i]`` is how the i-th block was read, ``there[i]`` whether it lies at its target now."""

    ends: list[ReadEnd] = field(default_factory=list)
    there: list[bool] = field(default_factory=list)
    read_faults: list[Fault] = field(default_factory=list)  # by source
    write_faults: list[Fault] = field(default_factory=list)  # by target


def move(sources: Sequence[Place], targets: Sequence[Place], sequence: Callable[[], int], scratch: Scratch) -> Moved:
    """Copy the blocks of ``sources``, each checked, to ``targets``, which have as many extents in all, at most LONGEST.

    Headers say the new places. A block that cannot be read leaves its target as it was.
    """
    layout = sources[0].layout
    slots = scratch.slots(sum(place.count for place in sources), layout.slot_bytes)
    moved, headers = Moved(), list[ExtentHeader | None]()
    for place in sources:
        at = len(moved.ends)
        found, fault = read_run(place, slots[at : at + place.count], scratch)
        moved.ends += [end for end, _ in found]
        headers += [header if end is ReadEnd.OK else None for end, header in found]
        moved.read_faults.append(fault)
    for place in targets:
        at = len(moved.there)
        there, fault = _rewrite(place, headers[at : at + place.count], slots[at : at + place.count], sequence, scratch)
        moved.there += there
        moved.write_faults.append(fault)
    return moved


def _rewrite(
    place: Place,
    headers: Sequence[ExtentHeader | None],
    slots: Sequence[Bytes],
    sequence: Callable[[], int],
    scratch: Scratch,
) -> tuple[list[bool], Fault]:
    """Write checked blocks to a run of extents; None: nothing goes there."""
    there = [header is not None for header in headers]
    if not place.file.intact():
        return [False] * len(there), Fault.VANISHED
    out = _outgoing(place, slots, scratch)
    for i, header in enumerate(headers):
        if header is not None:
            new = replace(header, segment=place.file.number, position=place.first + i, epoch=place.epoch, sequence=sequence())
            _close(place, new, slots[i], out[i], scratch.header(i))
    return there, _write_stretches(place, there, [data[: place.layout.slot_bytes] for data in out], scratch)


def _write_stretches(place: Place, wanted: list[bool], slots: Sequence[Bytes], scratch: Scratch) -> Fault:
    """Write header and slot of the extents that are ``wanted``, neighbours in one call; what failed is wanted no more."""
    fault = Fault.NONE
    scratch.enter()
    for start, end in _stretches(wanted):
        part = [b for i in range(start, end) for b in (scratch.header(i), slots[i])]
        try:
            place.file.write(part, place.offset + start * extent_bytes(place.layout))
        except OSError:
            wanted[start:end] = [False] * (end - start)
            fault = Fault.ERROR
    return fault


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


def _checked(place: Place, i: int, closed: Bytes, slot: Bytes, scratch: Scratch) -> tuple[ReadEnd, ExtentHeader | None]:
    """``closed`` is what was read; where the file is sealed it is opened into ``slot``, else it is that."""
    layout, vault = place.layout, place.file.vault
    page = scratch.header(i).tobytes()
    found = None if vault is None else vault.open_header(page)
    header = decode_extent(page) if vault is None else None if found is None else found.header
    if header is None or not belongs(header, place, place.first + i):
        return ReadEnd.TORN, None
    if vault is not None and found is not None and not vault.open_slot(found, closed, slot):
        return ReadEnd.TORN, header
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
