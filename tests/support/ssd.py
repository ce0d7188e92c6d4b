"""Blocks with contents that follow from their keys, and tiers on a folder of the test."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import MIB, StoreConfig
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Write
from moonpool.kvstore.ssd.tier import SsdTier

NODE = NodeId("n")
SMALL = KVLayout("small", layers=2, kv_heads=1, head_dim=16, dtype="float32", block_tokens=16)  # 4,096 bytes, slots of 8,192
OTHER = KVLayout("other", layers=3, kv_heads=2, head_dim=32, dtype="bfloat16", block_tokens=32)  # 24,576 bytes


def config(folder: Path, **settings: Any) -> StoreConfig:
    return StoreConfig(**{"ssd_path": str(folder), "ssd_bytes": 8 * MIB, "ssd_threads": 2, **settings})


async def tier(folder: Path, *layouts: KVLayout, io: Any = None, **settings: Any) -> SsdTier:
    return await SsdTier.open(config(folder, **settings), NODE, layouts or (SMALL,), io=io)


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
