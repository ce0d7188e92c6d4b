"""Blocks for the shared tier, and tiers that are closed again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import StoreConfig
from moonpool.core.ids import NodeId
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.shared_tier.tier import SharedRead, SharedTier
from moonpool.kvstore.ssd.blocks import Write
from support.store import LAYOUT, block_bytes, block_keys

SOON_S = 20.0
USE = Use("t", "chat", 2, 40)


@asynccontextmanager
async def shared_tier(path: object, node: str = "a", **given: Any) -> AsyncIterator[SharedTier]:
    """``given``: settings of the store without ``shared_``, and the parts that ``SharedTier.open`` takes."""
    parts = {name: given.pop(name) for name in ("objects", "clock", "keys") if name in given}
    config = StoreConfig(shared_path=str(path), **{f"shared_{name}": value for name, value in given.items()})
    tier = await SharedTier.open(config, NodeId(node), **parts)
    try:
        yield tier
    finally:
        await tier.close()


def slot(key: bytes) -> NDArray[np.uint8]:
    out = np.full(LAYOUT.slot_bytes, 0xEE, np.uint8)
    slices.fill(LAYOUT, out, 0, key, block_bytes(key))
    return out


def writes(name: str, n: int) -> list[Write]:
    keys = block_keys(name, n)
    return [Write(key, above, LAYOUT, USE, slot(key)) for above, key in zip([None, *keys], keys, strict=False)]


def reads(name: str, n: int) -> list[SharedRead]:
    return [SharedRead(key, LAYOUT, np.full(LAYOUT.slot_bytes, 7, np.uint8)) for key in block_keys(name, n)]


def is_right(read: SharedRead) -> bool:
    end = LAYOUT.block_bytes
    return bool((read.into[:end] == block_bytes(read.key)).all()) and not read.into[end + 8 * LAYOUT.layers :].any()


def untouched(read: SharedRead) -> bool:
    return bool((read.into == 7).all())
