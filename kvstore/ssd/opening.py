"""Opening a tier: lock, look, keep what fits, allocate the rest, scan. Blocks; called in a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from moonpool.core.config import MIB, StoreConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.ssd.device import Device
from moonpool.kvstore.ssd.files import Io, SegmentFile, aligned
from moonpool.kvstore.ssd.folder import SEGMENTS, Folder, segment_size
from moonpool.kvstore.ssd.format import (
    HEADER_BYTES,
    SegmentHeader,
    capacity,
    decode_segment,
    encode_segment,
    extent_bytes,
    split_extent,
)
from moonpool.kvstore.ssd.scan import Formatted, Progress, Scanned, in_flight, scan
from moonpool.kvstore.ssd.space import Segment, Space

FORGET_S = 24 * 3600  # a layout nobody registered for so long is forgotten
SEEN_S = 3600  # how exactly that is noted
SMALLEST = MIB  # smallest segment file worth making where a whole one does not fit


@dataclass
class Opened:
    folder: Folder
    space: Space
    files: dict[int, SegmentFile]
    scanned: Scanned
    cap: int
    next_number: int
    sequence: int  # the next to be used
    notes: list[str] = field(default_factory=list)  # what an operator should know


def open_folder(
    config: StoreConfig,
    node: NodeId,
    layouts: Sequence[KVLayout],
    io: Io,
    wall: Callable[[], float],
    progress: Progress,
    vault: Vault | None = None,
    zeroise: bool = False,
) -> Opened:
    """With a ``vault`` everything is sealed, and files that are not are removed; without one it is the other way round.

    ConfigError: another process has the folder, it cannot be written, or the tier is too small for one block."""
    folder = Folder.claim(io, config.ssd_path, node, vault)
    files: dict[int, SegmentFile] = {}
    try:
        cap = folder.cap(config.ssd_bytes)
        require_room(cap, layouts)
        opened = Opened(folder, Space(), files, Scanned(), cap, 0, 1)
        opened.space.known = {layout.fingerprint: layout for layout in layouts}
        headers = _adopt(opened, io, vault, zeroise)
        _allocate(opened, int(wall()))
        with ThreadPoolExecutor(config.ssd_threads, "ssd scan") as pool:
            _look(opened, headers, pool, config.ssd_threads, int(wall()), progress)
        if vault is not None and vault.strangers:
            keys = ", ".join(vault.strangers)
            opened.notes.append(f"blocks sealed with kv key {keys}, which is not here, are given up")
        return opened
    except BaseException:
        for file in files.values():
            file.close()
        folder.close()
        raise


def require_room(cap: int, layouts: Sequence[KVLayout]) -> None:
    for layout in layouts:
        if not capacity(segment_size(cap), layout):
            least = SEGMENTS * (HEADER_BYTES + extent_bytes(layout))
            raise ConfigError(
                f"store.ssd_bytes: {cap} bytes make segments of {segment_size(cap)}, smaller than one block "
                f"({extent_bytes(layout)} bytes); use {least} or more, or leave store.ssd_path empty",
                param="store.ssd_bytes",
            )


def _adopt(opened: Opened, io: Io, vault: Vault | None, zeroise: bool) -> list[SegmentHeader]:
    """Open what an earlier life left, as far as it fits under the cap: known layouts first. The rest is removed."""
    found: list[tuple[SegmentHeader, SegmentFile]] = []
    known, room = opened.space.known, opened.cap
    for number, path in opened.folder.found():
        opened.next_number = max(opened.next_number, number + 1)
        try:
            file = SegmentFile.open(io, path, number, None, create=False, vault=vault)
        except OSError as e:
            opened.notes.append(f"{path.name} was removed: {e.strerror}")
            path.unlink(missing_ok=True)
            continue
        header = _read(file)
        if header is None:
            file.close()
            path.unlink(missing_ok=True)
            opened.notes.append(f"{path.name} was removed: it carries no header of this version")
        elif header.sealed != (vault is not None):
            if zeroise and not header.sealed:
                _blank(file)
            file.close()
            path.unlink(missing_ok=True)
            was, setting = ("encrypted", "off") if header.sealed else ("not encrypted", "aes-gcm")
            opened.notes.append(f"{path.name} was removed: its blocks are {was}, and security.kv_encryption is {setting}")
        else:
            found.append((header, file))
    found.sort(key=lambda pair: (pair[0].layout is None or pair[0].layout.fingerprint not in known, pair[0].number))
    for _, file in found:
        if file.size <= room:
            room -= file.size
            opened.files[file.number] = file
        else:
            file.close()
            file.path.unlink(missing_ok=True)
    return [header for header, file in found if file.number in opened.files]


def _blank(file: SegmentFile) -> None:
    """Zeros all over it, as far as the disk lets us."""
    zeros = aligned(MIB)
    try:
        for offset in range(0, file.size, MIB):
            file.write([zeros[: min(MIB, file.size - offset)]], offset)
    except OSError:
        pass  # it is removed all the same


def _read(file: SegmentFile) -> SegmentHeader | None:
    """None where the header is not that of this file. A file that was cut is allocated again to its full length."""
    try:
        header = decode_segment(file.read_header())
        if header is None or header.number != file.number:
            return None
        file.grow(header.size)
    except OSError:
        return None
    return header


def _allocate(opened: Opened, now: int) -> None:
    """New segment files up to the cap; fewer or smaller ones where the file system refuses, or others need the rest."""
    size = segment_size(opened.cap)
    left = opened.cap - sum(file.size for file in opened.files.values())
    spare = Device.of(opened.folder.path).spare  # counted down here too: sparse files do not show in what is free
    while size >= min(SMALLEST, segment_size(opened.cap)) and size:
        if left < size:
            break
        try:
            Device.of(opened.folder.path).require(size, spare)
            add_segment(opened, size, now)
            left -= size
            spare -= size
        except OSError as e:
            size = size // 2 // HEADER_BYTES * HEADER_BYTES
            reason = e.strerror or os.strerror(e.errno or 0)
            note = f"no more was taken: {reason}"
            if note not in opened.notes:
                opened.notes.append(note)


def add_segment(opened: Opened, size: int, now: int) -> None:
    number = opened.next_number
    opened.next_number += 1
    file = make_segment(opened.folder, number, size, now)
    opened.files[number] = file
    opened.space.put(Segment(number, size, None, 0, now))


def make_segment(folder: Folder, number: int, size: int, now: int) -> SegmentFile:
    """A new segment file with its header. OSError: nothing is left of it."""
    file = folder.make(number, size)
    try:
        file.write_header(encode_segment(SegmentHeader(number, size, 0, now, None, file.vault is not None)))
    except OSError:
        file.close()
        file.path.unlink(missing_ok=True)
        raise
    return file


def _look(
    opened: Opened, headers: list[SegmentHeader], pool: ThreadPoolExecutor, threads: int, now: int, progress: Progress
) -> None:
    formatted: list[Formatted] = []
    space, epochs = opened.space, [0]
    for header in headers:
        file, layout, seen = opened.files[header.number], header.layout, header.seen
        sealed = header.sealed
        known = layout is not None and layout.fingerprint in space.known
        epochs.append(header.epoch)
        try:
            if layout is not None and not known and now - seen > FORGET_S:
                layout = None
                file.write_header(encode_segment(SegmentHeader(file.number, file.size, header.epoch, now, None, sealed)))
            elif known and now - seen > SEEN_S:
                seen = now
                file.write_header(encode_segment(SegmentHeader(file.number, file.size, header.epoch, now, layout, sealed)))
        except OSError:
            opened.scanned.counts["write_errors"] += 1
        space.put(Segment(file.number, file.size, layout, header.epoch, seen))
        if layout is not None:
            formatted.append(Formatted(file, layout, header.epoch))
    scanned = opened.scanned = scan(formatted, pool, in_flight(threads), progress)
    opened.sequence = max(scanned.sequence, *epochs) + 1
    for extent in scanned.headers:
        number, position = split_extent(extent)
        space.segments[number].written[position] = 1
    for blocks in scanned.kept.values():
        for block in blocks:
            number, position = split_extent(block.extent)
            space.segments[number].occupy(position)
