"""What the SSD tier is killed in: writing (demote), reading (promote), moving blocks together (compact)."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonpool.bench.crash import Checked, Operation, Stage
from moonpool.core.config import MIB, StoreConfig
from moonpool.core.ids import NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore import slices
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Recovered, Write
from moonpool.kvstore.ssd.tier import SsdTier

LAYOUT = KVLayout("crash", layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=64)  # 256 KiB blocks
OTHER = KVLayout("other", layers=6, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=64)
CAP = 48 * MIB
BATCH = 16
ROUNDS = 3  # segments that can be emptied where half of the blocks are left
LOW, HIGH, FULL = 0, 1, 2  # notes: numbers of the blocks that must be there: LOW <= n < HIGH; the highest ever begun


def ssd_operations() -> list[Operation]:
    return [_Demote(), _Promote(), _Compact()]


def _key(n: int) -> bytes:
    return hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest()


def _content(layout: KVLayout, key: bytes) -> NDArray[np.uint8]:
    words = np.random.default_rng(int.from_bytes(key, "little")).integers(0, 1 << 63, 512, dtype=np.int64)
    return np.resize(words.view(np.uint8), layout.block_bytes)


class _Memory:
    """[BATCH] page-aligned slots, used again for every batch."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        whole = np.frombuffer(mmap.mmap(-1, BATCH * layout.slot_bytes), dtype=np.uint8)
        self.slots = [whole[i * layout.slot_bytes : (i + 1) * layout.slot_bytes] for i in range(BATCH)]

    def writes(self, numbers: Sequence[int]) -> list[Write]:
        """A chain: each block is the parent of the next."""
        out, parent = [], None
        for n, slot in zip(numbers, self.slots, strict=False):
            slices.fill(self.layout, slot, 0, _key(n), _content(self.layout, _key(n)))
            out.append(Write(_key(n), parent, self.layout, Use("t", turn=n % 7), slot))
            parent = _key(n)
        return out

    async def wrong(self, tier: SsdTier, blocks: Sequence[Recovered]) -> tuple[int, int]:
        """(right, wrong) of ``blocks`` read back; ones that the tier itself refuses are neither."""
        right = wrong = 0
        for at in range(0, len(blocks), BATCH):
            part = blocks[at : at + BATCH]
            reads = [Read(b.extent, b.key, self.layout, slot) for b, slot in zip(part, self.slots, strict=False)]
            for block, slot, end in zip(part, self.slots, await tier.read(reads, 60.0), strict=False):
                if end is ReadEnd.OK:
                    same = np.array_equal(slot[: self.layout.block_bytes], _content(self.layout, block.key))
                    right += same
                    wrong += not same
        return right, wrong


async def _open(folder: Path) -> SsdTier:
    config = StoreConfig(ssd_path=str(folder), ssd_bytes=CAP)
    return await SsdTier.open(config, NodeId("crash"), [LAYOUT, OTHER], move_bytes_per_s=0.0)


async def _look(folder: Path, must: set[bytes]) -> Checked:
    """Every block found is read and compared; ``must`` are those that were written and not freed before the kill."""
    tier = await _open(folder)
    try:
        faults = []
        right = 0
        for layout in (LAYOUT, OTHER):
            blocks = [b for b in tier.recovered if b.layout == layout.fingerprint]
            ok, wrong = await _Memory(layout).wrong(tier, blocks)
            right += ok
            if wrong:
                faults.append(f"{wrong} blocks with wrong bytes")
        missing = len(must - {b.key for b in tier.recovered})
        if missing:
            faults.append(f"{missing} of {len(must)} blocks that were written are not found")
        tier.free([b.extent for b in tier.recovered])
        room, whole = tier.room(LAYOUT), tier.numbers()["ssd_segments"] * _per_segment(LAYOUT)
        if room != whole:
            faults.append(f"room for {room} blocks where {whole} fit into an empty tier")
        return Checked(right, tuple(faults), int(tier.numbers()["ssd_mismatches_start"]))
    finally:
        await tier.close()


def _per_segment(layout: KVLayout) -> int:
    return (CAP // 8 - 4096) // (4096 + layout.slot_bytes)


class _Demote:
    """Batches are written for ever; the oldest ones are freed where room lacks, so that live files are written over."""

    name = "demote"

    def run(self, folder: Path, stage: Stage) -> None:
        asyncio.run(self._run(folder, stage))

    async def _run(self, folder: Path, stage: Stage) -> None:
        tier, memory = await _open(folder), _Memory(LAYOUT)
        numbers = {_key(n): n for n in range(stage.noted(FULL))}
        extents = {numbers[b.key]: b.extent for b in tier.recovered if b.key in numbers}
        at = stage.noted(FULL)
        while True:
            while tier.room(LAYOUT) < BATCH:  # numbers that a kill left out free nothing
                low = min(extents) + 4 * BATCH
                stage.note(LOW, max(low, stage.noted(LOW)))
                tier.free([extents.pop(n) for n in sorted(extents) if n < low])
            batch = range(at, at + BATCH)
            writes = memory.writes(batch)
            stage.note(FULL, at + BATCH)
            stage.begin()
            written = await tier.write(writes)
            stage.end()
            extents.update((n, e) for n, e in zip(batch, written, strict=True) if e is not None)
            if None in written:
                raise RuntimeError(f"a block could not be written: {tier.numbers()}")
            if stage.noted(HIGH) != at:
                stage.note(LOW, at)  # a batch between was cut by a kill
            stage.note(HIGH, at + BATCH)
            at += BATCH

    def check(self, folder: Path, stage: Stage) -> Checked:
        return asyncio.run(_look(folder, {_key(n) for n in range(stage.noted(LOW), stage.noted(HIGH))}))


class _Promote:
    """Blocks are written once, then read for ever."""

    name = "promote"
    blocks = 8 * BATCH

    def run(self, folder: Path, stage: Stage) -> None:
        asyncio.run(self._run(folder, stage))

    async def _run(self, folder: Path, stage: Stage) -> None:
        tier, memory, rng = await _open(folder), _Memory(LAYOUT), random.Random(1)
        extents = {b.key: b.extent for b in tier.recovered}
        if not stage.noted(HIGH):
            for at in range(0, self.blocks, BATCH):
                written = await tier.write(memory.writes(range(at, at + BATCH)))
                extents.update((_key(at + i), e) for i, e in enumerate(written) if e is not None)
            stage.note(HIGH, self.blocks)
        while True:
            chosen = rng.sample(sorted(extents), BATCH)
            reads = [Read(extents[key], key, LAYOUT, slot) for key, slot in zip(chosen, memory.slots, strict=True)]
            stage.begin()
            ends = await tier.read(reads, 60.0)
            stage.end()
            if set(ends) != {ReadEnd.OK}:
                raise RuntimeError(f"reads ended {ends}")

    def check(self, folder: Path, stage: Stage) -> Checked:
        return asyncio.run(_look(folder, {_key(n) for n in range(stage.noted(HIGH))}))


class _Compact:
    """The tier is filled with one layout, every other chain freed, and one segment after the other emptied."""

    name = "compact"

    def run(self, folder: Path, stage: Stage) -> None:
        asyncio.run(self._run(folder, stage))

    async def _run(self, folder: Path, stage: Stage) -> None:
        tier, memory = await _open(folder), _Memory(LAYOUT)
        tier.free([b.extent for b in tier.recovered])
        while True:
            await self._scatter(tier, memory, stage)
            for _ in range(ROUNDS):
                stage.begin()
                await tier.compact(OTHER)
                stage.end()

    def __init__(self) -> None:
        self._kept: set[int] = set()  # the child's

    async def _scatter(self, tier: SsdTier, memory: _Memory, stage: Stage) -> None:
        stage.note(HIGH, stage.noted(LOW))
        await tier.erase(list(self._kept))
        self._kept.clear()
        first = at = stage.noted(FULL)
        extents: list[int | None] = []
        while tier.room(LAYOUT) >= BATCH:
            extents += await tier.write(memory.writes(range(at, at + BATCH)))
            at += BATCH
        stage.note(FULL, at)
        tier.on_moved = self._moved
        for i, extent in enumerate(extents):
            if extent is None:
                raise RuntimeError("a block could not be written")
            if i // BATCH % 2:
                tier.free([extent])
            else:
                self._kept.add(extent)
        stage.note(LOW, first)
        stage.note(HIGH, at)

    def _moved(self, moved: Mapping[int, int]) -> None:
        self._kept.difference_update(moved)
        self._kept.update(moved.values())

    def check(self, folder: Path, stage: Stage) -> Checked:
        low, high = stage.noted(LOW), stage.noted(HIGH)
        return asyncio.run(_look(folder, {_key(n) for n in range(low, high) if (n - low) // BATCH % 2 == 0}))
