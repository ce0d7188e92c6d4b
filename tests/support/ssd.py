"""Blocks with contents that follow from their keys, and tiers on a folder of the test."""

from __future__ import annotations

import errno
import hashlib
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import MIB, StoreConfig
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.sealing.keys import KvKeys
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Write
from moonpool.kvstore.ssd.files import Io
from moonpool.kvstore.ssd.format import HEADER_BYTES, extent_bytes, offset_of, split_extent
from moonpool.kvstore.ssd.tier import SsdTier

NODE = NodeId("n")
SMALL = KVLayout("small", layers=2, kv_heads=1, head_dim=16, dtype="float32", block_tokens=16)  # 4,096 bytes, slots of 8,192
OTHER = KVLayout("other", layers=3, kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=32)  # 24,576 bytes
LATENTS = KVLayout("latents", layers=2, kv_heads=1, head_dim=40, dtype="bfloat16", block_tokens=16, kind="mla")  # 2,560


def config(folder: Path, **settings: Any) -> StoreConfig:
    return StoreConfig(**{"ssd_path": str(folder), "ssd_bytes": 8 * MIB, "ssd_threads": 2, **settings})


async def tier(
    folder: Path,
    *layouts: KVLayout,
    io: Io | None = None,
    wall: Callable[[], float] = time.time,
    keys: KvKeys | None = None,
    **settings: Any,
) -> SsdTier:
    """Compaction is not slowed down. Encrypted where there are ``keys``."""
    return await SsdTier.open(
        config(folder, **settings), NODE, layouts or (SMALL,), io=io, wall=wall, move_bytes_per_s=0.0, keys=keys
    )


async def put(of: SsdTier, layout: KVLayout, names: Sequence[int], chain: bool = False) -> dict[int, int]:
    """Write blocks, all of which must find room; extents by number."""
    extents = await of.write(writes(layout, names, chain=chain))
    placed = {n: extent for n, extent in zip(names, extents, strict=True) if extent is not None}
    assert len(placed) == len(names)
    return placed


def found(of: SsdTier, layout: KVLayout = SMALL) -> dict[bytes, int]:
    """Key -> extent of what was there at start."""
    return {block.key: block.extent for block in of.recovered if block.layout == layout.fingerprint}


def keys(names: Iterable[int]) -> set[bytes]:
    return {key(n) for n in names}


def key(n: int) -> bytes:
    return hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest()


def slots(layout: KVLayout, n: int) -> list[NDArray[np.uint8]]:
    """``n`` page-aligned [slot_bytes] views of memory full of ones, which no block's content is."""
    memory = np.frombuffer(mmap.mmap(-1, max(n, 1) * layout.slot_bytes), dtype=np.uint8)
    memory[:] = 0xFF
    return [memory[i * layout.slot_bytes : (i + 1) * layout.slot_bytes] for i in range(n)]


def content(layout: KVLayout, name: bytes) -> NDArray[np.uint8]:
    """[block_bytes] that follow from the key."""
    seed = int.from_bytes(name[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, layout.block_bytes, dtype=np.uint8)


def writes(layout: KVLayout, names: Sequence[int], use: Use = Use(), chain: bool = False) -> list[Write]:
    """Blocks named by numbers; ``chain``: each is the parent of the next, else all are first blocks."""
    out = []
    for i, (n, slot) in enumerate(zip(names, slots(layout, len(names)), strict=True)):
        slices.fill(layout, slot, 0, key(n), content(layout, key(n)))
        out.append(Write(key(n), key(names[i - 1]) if chain and i else None, layout, use, slot))
    return out


async def read(
    of: SsdTier, layout: KVLayout, extents: dict[int, int], deadline_s: float = 60.0
) -> dict[int, NDArray[np.uint8] | ReadEnd]:
    """number -> its [block_bytes], or how its read ended. ``extents`` by number."""
    memory = slots(layout, len(extents))
    reads = [Read(extent, key(n), layout, into) for (n, extent), into in zip(extents.items(), memory, strict=True)]
    ends = await of.read(reads, deadline_s)
    return {
        n: slot[: layout.block_bytes] if end is ReadEnd.OK else end for n, end, slot in zip(extents, ends, memory, strict=True)
    }


async def right(of: SsdTier, layout: KVLayout, extents: dict[int, int]) -> set[int]:
    """Numbers read whole; a block that reads as anything but its content fails the test."""
    out = set()
    for n, got in (await read(of, layout, extents)).items():
        if not isinstance(got, ReadEnd):
            assert np.array_equal(got, content(layout, key(n))), f"wrong bytes for block {n}"
            out.add(n)
    return out


def stored(folder: Path, layout: KVLayout, extent: int) -> tuple[Path, int, int]:
    """(file, offset, bytes) of an extent, header included."""
    number, position = split_extent(extent)
    return folder / NODE / f"segment-{number:06}", offset_of(position, layout), extent_bytes(layout)


def peek(folder: Path, layout: KVLayout, extent: int) -> bytes:
    path, offset, size = stored(folder, layout, extent)
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def poke(folder: Path, layout: KVLayout, extent: int, raw: bytes, at: int = 0) -> None:
    """Write behind the tier's back, ``at`` bytes into the extent."""
    path, offset, _ = stored(folder, layout, extent)
    with path.open("r+b") as file:
        file.seek(offset + at)
        file.write(raw)


def flip(folder: Path, layout: KVLayout, extent: int, at: int) -> None:
    poke(folder, layout, extent, bytes((peek(folder, layout, extent)[at] ^ 0x10,)), at)


class Faulty(Io):
    """A disk that fails as told. ``write`` and ``read`` are asked before each call on blocks with (fd, number of the call,
    bytes, offset); they return an errno to raise, bytes to stop after, or None. ``gate`` holds reads back until it is set.
    """

    def __init__(self) -> None:
        self.write: Fault = lambda fd, n, size, offset: None
        self.read: Fault = lambda fd, n, size, offset: None
        self.room = 1 << 62  # bytes that may be allocated
        self.direct = True
        self.allocates = True
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Semaphore(0)  # released by every read that has begun
        self._calls = itertools.count(1)

    def open(self, path: Path, *, create: bool, direct: bool) -> int:
        if direct and not self.direct:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return super().open(path, create=create, direct=direct)

    def allocate(self, fd: int, size: int) -> None:
        if not self.allocates:
            raise OSError(errno.EOPNOTSUPP, "cannot allocate here")
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size
        super().allocate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        size = sum(b.nbytes for b in buffers)
        fault = self.write(fd, next(self._calls), size, offset)
        if isinstance(fault, Short):
            return super().pwritev(fd, _prefix(buffers, fault.size), offset)
        if fault is not None:
            raise OSError(fault, "injected")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[NDArray[np.uint8]], offset: int) -> int:
        size = sum(b.nbytes for b in buffers)
        if size > HEADER_BYTES:
            self.inside.release()
            self.gate.wait()
        fault = self.read(fd, next(self._calls), size, offset)
        if isinstance(fault, Short):
            return min(fault.size, super().preadv(fd, buffers, offset))
        if fault is not None:
            raise OSError(fault, "injected")
        return super().preadv(fd, buffers, offset)


def _prefix(buffers: Sequence[NDArray[np.uint8]], size: int) -> list[NDArray[np.uint8]]:
    """The first ``size`` bytes, in whole pages."""
    out, left = [], size // HEADER_BYTES * HEADER_BYTES
    for buffer in buffers:
        out.append(buffer[: max(0, left)])
        left -= buffer.nbytes
    return out


@dataclass(frozen=True)
class Short:
    """So many bytes are transferred and no more."""

    size: int


Fault = Callable[[int, int, int, int], int | Short | None]
