"""The shared tier (G4): blocks in a folder that all nodes mount, or in object storage. Written once, found by all.

A block's place follows from its layout and key, so there is no index to keep, recover or agree on. Nothing that comes
back is trusted: sizes are known before anything is read, digests are checked on a private copy, and what does not fit is
a miss. A store that cannot be reached is a miss too, is asked again after growing pauses, and never holds serving up:
each call has a deadline, after which it is given up even if its thread is stuck.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import StoreConfig
from moonpool.core.ids import NodeId
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.kvstore.sealing.keys import KvKeys
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.shared_tier.crew import Crew, Op
from moonpool.kvstore.shared_tier.form import Outage, copy_of, object_bytes, object_name, seal, slot_in
from moonpool.kvstore.shared_tier.places import Folder, Objects
from moonpool.kvstore.shared_tier.s3 import Bucket
from moonpool.kvstore.ssd.blocks import ReadEnd, Write
from moonpool.kvstore.ssd.format import writable

KNOWN = 1 << 16  # names remembered: those seen there, and those whose bytes were wrong
CLOSE_PATIENCE_S = 2.0
COUNTERS = (
    "blocks_written",
    "blocks_there_already",
    "bytes_written",
    "bytes_read",
    *(f"reads_{end}" for end in ReadEnd),
    "mismatches_write",
    "writes_unfit",
    "writes_late",
    "erased",
    "faults",
    "refused_in_pause",
    "refused_full",
)
T = TypeVar("T")
log = structlog.get_logger(__name__)


class _Wrote(StrEnum):
    WRITTEN = "blocks_written"
    THERE = "blocks_there_already"
    MISMATCH = "mismatches_write"
    GIVEN_UP = "writes_late"


@dataclass(frozen=True, slots=True, eq=False)
class SharedRead:
    """``into`` is a [slot_bytes] uint8 view; it belongs to the tier until ``read`` returns."""

    key: bytes
    layout: KVLayout
    into: NDArray[np.uint8]


class _Names:
    """A bounded set; the oldest go first."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        self._names[name] = None
        if len(self._names) > KNOWN:
            del self._names[next(iter(self._names))]

    def discard(self, name: str) -> None:
        self._names.pop(name, None)


class SharedTier:
    """Event-loop only."""

    def __init__(self, config: StoreConfig, objects: Objects, clock: Callable[[], float], vault: Vault | None = None) -> None:
        self._objects = objects
        self._vault = vault
        self._clock = clock
        self._threads = config.shared_threads
        self._crew = Crew(config.shared_threads)
        self._reads, self._writes = Outage(), Outage()  # apart: a store that is full can be read
        self._there = _Names()
        self._wrong = _Names()  # to be written anew by whoever has the block
        self.counted: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        node: NodeId,
        *,
        objects: Objects | None = None,
        clock: Callable[[], float] = time.monotonic,
        keys: KvKeys | None = None,
    ) -> SharedTier:
        """With ``keys`` objects are encrypted, and plain ones are not seen.

        ConfigError: a folder that cannot be written, no bucket's URL, no client for object storage.
        """
        vault = None if keys is None else Vault(keys)
        return cls(config, await asyncio.to_thread(_objects, config, node) if objects is None else objects, clock, vault)

    def _name(self, layout: KVLayout, key: bytes) -> str:
        return object_name(layout.fingerprint, key, sealed=self._vault is not None)

    async def exists(self, layout: KVLayout, keys: Sequence[bytes], deadline_s: float) -> int:
        """How many leading keys are there; what is not known by the deadline counts as missing."""
        if self._reads.left(self._clock()):
            return 0
        until = self._clock() + deadline_s
        names = [self._name(layout, key) for key in keys]
        found = 0
        while found < len(names):
            if names[found] in self._there:
                found += 1
                continue
            part = names[found : found + self._threads]
            sizes = await self._run(self._reads, [partial(self._size, name) for name in part], until - self._clock())
            here = next((i for i, size in enumerate(sizes) if size != object_bytes(layout)), len(part))
            for name in part[:here]:
                self._there.add(name)
            found += here
            if here < len(part):
                break
        return found

    async def write(self, blocks: Sequence[Write], deadline_s: float = 30.0) -> list[bool]:
        """Which of the blocks are there now. Their data is not touched after this returns. Parents before children, please."""
        fit = [writable(block.layout, block.key, block.parent, block.use) for block in blocks]
        self.counted["writes_unfit"] += fit.count(False)
        chosen = [block for block, good in zip(blocks, fit, strict=True) if good]
        ends = iter(await self._run(self._writes, [partial(self._write, block) for block in chosen], deadline_s))
        out = []
        for block, good in zip(blocks, fit, strict=True):
            end = next(ends) if good else None
            done = end in (_Wrote.WRITTEN, _Wrote.THERE)
            out.append(done)
            if good:
                self.counted[_Wrote.GIVEN_UP if end is None else end] += 1
            if done:
                name = self._name(block.layout, block.key)
                self._wrong.discard(name)
                self._there.add(name)
            if end is _Wrote.WRITTEN:
                self.counted["bytes_written"] += object_bytes(block.layout)
        return out

    async def read(self, reads: Sequence[SharedRead], deadline_s: float) -> list[ReadEnd]:
        """How each read ended; the deadline holds even for reads that a thread has begun. Only OK touched ``into``."""
        found = await self._run(self._reads, [partial(self._read, read) for read in reads], deadline_s)
        out = []
        for read, one in zip(reads, found, strict=True):
            end = ReadEnd.LATE if one is None else one
            name = self._name(read.layout, read.key)
            if end is ReadEnd.TORN:
                self._wrong.add(name)
            if end in (ReadEnd.TORN, ReadEnd.GONE):
                self._there.discard(name)
            if end is ReadEnd.OK:
                self.counted["bytes_read"] += object_bytes(read.layout)
            self.counted[f"reads_{end}"] += 1
            out.append(end)
        return out

    async def erase(self, layout: KVLayout, keys: Sequence[bytes], deadline_s: float = 30.0) -> int:
        """Remove blocks for everybody; returns how many there were. Other nodes notice when they read."""
        names = [self._name(layout, key) for key in keys]
        for name in names:
            self._there.discard(name)
        gone = await self._run(self._writes, [partial(self._remove, name) for name in names], deadline_s)
        self.counted["erased"] += gone.count(True)
        return gone.count(True)

    def numbers(self) -> dict[str, float]:
        """Gauges and counters for metrics; sizes in bytes."""
        state = {
            "shared_readable": not self._reads.fault,
            "shared_writable": not self._writes.fault,
            "shared_outstanding": self._crew.outstanding,
        }
        counts = {f"shared_{name}": value for name, value in self.counted.items()}
        return {name: float(value) for name, value in (*state.items(), *counts.items())}

    def words(self) -> dict[str, str]:
        """State in words, for operators."""
        now = self._clock()
        return {"shared_reads": self._reads.words(now), "shared_writes": self._writes.words(now)}

    async def close(self) -> None:
        """Threads stuck in a call are left behind; they hold up nobody's exit."""
        stuck = await self._crew.close(CLOSE_PATIENCE_S)
        if stuck:
            log.warning("shared tier: threads are stuck in the store", threads=stuck)

    # In the threads.

    def _size(self, name: str, op: Op[int | None]) -> int | None:
        return None if name in self._wrong else self._objects.size(name)

    def _write(self, block: Write, op: Op[_Wrote]) -> _Wrote:
        name = self._name(block.layout, block.key)
        if name not in self._wrong and self._objects.size(name) == object_bytes(block.layout):
            return _Wrote.THERE
        copies: list[NDArray[np.uint8]] = []
        if not op.touching(lambda: copies.append(copy_of(block))):
            return _Wrote.GIVEN_UP
        (raw,) = copies
        made = seal(raw, block, self._vault)
        if made is None:
            return _Wrote.MISMATCH
        self._objects.put(name, made)
        return _Wrote.WRITTEN

    def _read(self, read: SharedRead, op: Op[ReadEnd]) -> ReadEnd:
        layout = read.layout
        raw = self._objects.get(self._name(layout, read.key), object_bytes(layout))
        if raw is None:
            return ReadEnd.GONE
        slot = slot_in(raw, layout, read.key, self._vault)
        if slot is None:
            return ReadEnd.TORN

        return ReadEnd.OK if op.touching(partial(_fill, read, slot)) else ReadEnd.LATE

    def _remove(self, name: str, op: Op[bool]) -> bool:
        return self._objects.remove(name)

    # Faults.

    async def _run(self, way: Outage, works: Sequence[Callable[[Op[T]], T]], deadline_s: float) -> list[T | None]:
        """Results in order; None: refused, late, or failed."""
        if way.left(self._clock()):
            self.counted["refused_in_pause"] += len(works)
            return [None] * len(works)
        ops = [self._crew.submit(work) for work in works]
        self.counted["refused_full"] += ops.count(None)
        await self._crew.settle([op for op in ops if op is not None], deadline_s)
        return [None if op is None else self._result(way, op) for op in ops]

    def _result(self, way: Outage, op: Op[T]) -> T | None:
        if op.future.cancelled():
            return None
        fault = op.future.exception()
        if fault is None:
            if way.worked():
                log.info("shared tier: reachable again", writing=way is self._writes)
            return op.future.result()
        if not isinstance(fault, OSError):
            raise fault
        self.counted["faults"] += 1
        if way.failed(str(fault) or type(fault).__name__, self._clock()):
            log.warning("shared tier: unreachable", writing=way is self._writes, fault=str(fault))
        return None


def _objects(config: StoreConfig, node: NodeId) -> Objects:
    return Bucket(config) if config.shared_path.startswith("s3://") else Folder.open(config.shared_path, node)


def _fill(read: SharedRead, slot: NDArray[np.uint8]) -> None:
    """What lies past the trailer is covered by no digest: nobody ever reads it."""
    end = read.layout.block_bytes + read.layout.layers * DIGEST_BYTES
    read.into[:end] = slot[:end]
    read.into[end:] = 0
