"""The local SSD tier: blocks in large preallocated files, direct I/O, found again after a crash. Knows nothing of the pool.

Faults of the disk never raise into serving: a write that fails answers None, a read says late, torn or gone, and
``on_lost`` names extents that are no more. Whoever holds the pool reacts to that and to nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from moonpool.core.config import StoreConfig
from moonpool.core.errors import Bug
from moonpool.core.ids import NodeId
from moonpool.core.layout import SLOT_ALIGN, KVLayout
from moonpool.kvstore.ssd.blocks import Read, ReadEnd, Recovered, Write
from moonpool.kvstore.ssd.compaction import Compactor
from moonpool.kvstore.ssd.copying import LONGEST, Fault, Place, WriteEnd, read_run, write_run
from moonpool.kvstore.ssd.erasing import Eraser
from moonpool.kvstore.ssd.files import Bytes, Io
from moonpool.kvstore.ssd.flow import Flow, Kind, Op
from moonpool.kvstore.ssd.format import ExtentHeader, extent_bytes, split_extent, writable
from moonpool.kvstore.ssd.opening import Opened, open_folder
from moonpool.kvstore.ssd.scan import Progress
from moonpool.kvstore.ssd.segments import Segments
from moonpool.kvstore.ssd.space import Segment, runs

RUN_BYTES = 4 << 20  # most bytes of one system call
MOVE_BYTES_PER_S = 256e6  # of compaction, reads and writes together
CLOSE_S = 1.0  # what runs beside serving may take so long to end by itself
COUNTERS = (
    "blocks_written",
    "blocks_moved",
    *(f"reads_{end}" for end in ReadEnd),
    *(f"mismatches_{place}" for place in ("write", "read", "move", "start")),
    "verified_at_start",
    "orphans_at_start",
    "duplicates_at_start",
    "extents_lost",
    "extents_forgotten",
    "segments_formatted",
    "segments_compacted",
    "segments_lost",
    "read_errors",
    "write_errors",
    "writes_failed",
    "writes_unfit",
    "writes_without_room",
    "erase_failed",
)


_ReadResult = tuple[list[tuple[ReadEnd, ExtentHeader | None]], Fault]
_Reading = tuple[Segment, list[int], list[int], Op[_ReadResult]]


def _silent(done: int, total: int) -> None:
    """Nobody watches the start."""


class SsdTier:
    """Event-loop only. ``on_lost(extents)`` and ``on_moved({from: to})`` are called on the loop, before the call that
    brought them about returns; both may name extents that their listener has not learned of yet, or freed just now.
    """

    def __init__(
        self,
        config: StoreConfig,
        opened: Opened,
        clock: Callable[[], float],
        wall: Callable[[], float],
        move_bytes_per_s: float,
    ) -> None:
        self.on_lost: Callable[[Sequence[int]], None] = lambda extents: None
        self.on_moved: Callable[[Mapping[int, int]], None] = lambda moved: None
        self._clock = clock
        self.counted: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.counted.update(opened.scanned.counts)
        rates = {
            Kind.READ: config.ssd_read_bytes_per_s,
            Kind.WRITE: config.ssd_write_bytes_per_s,
            Kind.MOVE: move_bytes_per_s,
        }
        self._threads = config.ssd_threads
        self._flow = Flow(config.ssd_threads, rates, clock)
        self._sequence = itertools.count(opened.sequence)
        self._segments = Segments(opened, self._flow, self._next_sequence, wall, self.counted, self._lost)
        self._space = self._segments.space
        moving = asyncio.Lock()
        self._eraser = Eraser(self._segments, self._flow, self.counted, self._lost, moving)
        self._eraser.forget(opened.scanned.torn)
        self._compactor = Compactor(
            self._segments, self._eraser, self._flow, self._next_sequence, self.counted, self._moved, moving
        )
        self._strangers = dict(opened.scanned.kept)
        self.recovered = [b for layout in self._space.known for b in self._strangers.pop(layout, ())]

    @classmethod
    async def open(
        cls,
        config: StoreConfig,
        node: NodeId,
        layouts: Sequence[KVLayout],
        *,
        io: Io | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        progress: Progress = _silent,
        move_bytes_per_s: float = MOVE_BYTES_PER_S,
    ) -> SsdTier:
        """Locks the node's folder, allocates, and finds the blocks of an earlier life (``recovered``).

        ConfigError: the folder is in use by another process or cannot be written, or a segment holds no block.
        ``progress`` is called in another thread. ``clock`` times deadlines, ``wall`` dates layouts, both in seconds.
        """
        opened = await asyncio.to_thread(open_folder, config, node, layouts, io or Io(), wall, progress)
        return cls(config, opened, clock, wall, move_bytes_per_s)

    def register(self, layout: KVLayout) -> list[Recovered]:
        """Blocks of ``layout`` may be written and read from now on; returns those found at start, parents first."""
        if layout.fingerprint in self._space.known:
            return []
        self._segments.know(layout)
        found = self._strangers.pop(layout.fingerprint, [])
        return [block for block in found if self._space.find(block.extent, layout) is not None]

    def room(self, layout: KVLayout) -> int:
        """Extents that could be written now without freeing any."""
        return self._space.room(layout)

    # -- writing -----------------------------------------------------------------------------------------------------

    async def write(self, blocks: Sequence[Write]) -> list[int | None]:
        """The extent of each block, or None: no room, or it could not be written. Parents before children, please."""
        out: list[int | None] = [None] * len(blocks)
        by_layout: dict[KVLayout, list[int]] = defaultdict(list)
        for i, block in enumerate(blocks):
            _require_slot(block.data, block.layout)
            if writable(block.layout, block.key, block.parent, block.use):
                by_layout[block.layout].append(i)
            else:
                self.counted["writes_unfit"] += 1
        try:
            for layout, places in by_layout.items():
                await self._write_layout(layout, [blocks[i] for i in places], places, out)
        except asyncio.CancelledError:
            self.free(extent for extent in out if extent is not None)  # nobody will learn of them
            raise
        where = self._segments.resolve  # files may have gone, and blocks moved, since the first of these was written
        return [None if extent is None else where(extent, block.layout) for extent, block in zip(out, blocks, strict=True)]

    async def _write_layout(self, layout: KVLayout, blocks: list[Write], places: list[int], out: list[int | None]) -> None:
        self.register(layout)
        await self._segments.prepare(layout, len(blocks))
        extents = self._space.take(layout, len(blocks))
        if len(extents) < len(blocks):
            self.counted["writes_without_room"] += len(blocks) - len(extents)
            self._compactor.want(layout)
        parts: list[tuple[Segment, list[int], list[int], Op[tuple[list[WriteEnd], Fault]]]] = []
        at = 0
        for run in runs(extents, self._longest(layout, len(extents))):
            segment, place = self._place(run, layout)
            op = Op(Kind.WRITE, place.size, partial(write_run, place, blocks[at : at + len(run)], self._next_sequence))
            parts.append((segment, run, places[at : at + len(run)], op))
            self._segments.filling(run)
            self._flow.submit(op)
            at += len(run)
        try:
            await self._flow.settle([op for *_, op in parts])
        finally:
            for segment, run, mine, op in parts:
                self._wrote(segment, run, mine, op.future.result(), out)

    def _wrote(
        self,
        segment: Segment,
        run: list[int],
        places: list[int],
        result: tuple[list[WriteEnd], Fault] | None,
        out: list[int | None],
    ) -> None:
        ends, fault = result or ([WriteEnd.FAILED] * len(run), Fault.NONE)
        for extent, i, end in zip(run, places, ends, strict=True):
            if end is WriteEnd.OK:
                out[i] = extent
            else:
                segment.release(split_extent(extent)[1])
                self.counted["mismatches_write" if end is WriteEnd.MISMATCH else "writes_failed"] += 1
        self.counted["blocks_written"] += ends.count(WriteEnd.OK)
        self._segments.unpin(segment, run)
        self._segments.fault(segment, fault, writing=True)
        if not self._segments.present(segment):
            for i in places:
                out[i] = None

    # -- reading -----------------------------------------------------------------------------------------------------

    async def read(self, reads: Sequence[Read], deadline_s: float) -> list[ReadEnd]:
        """How each read ended. None is begun that would end later than ``deadline_s`` seconds from now.

        A read that a thread has begun is waited for, however late: the kernel may write its buffer until the call
        returns. So a request that must not wait for a stalled disk awaits this in a task of its own. Torn and
        unreadable extents are dropped, and named to ``on_lost`` before this returns. Cancelling gives up what is not
        begun, and is raised when the last buffer is out of reach of the kernel.
        """
        until = self._clock() + deadline_s
        ends = [ReadEnd.GONE] * len(reads)
        placed: list[tuple[int, int]] = []
        for i, read in enumerate(reads):
            _require_slot(read.into, read.layout)
            extent = self._segments.resolve(read.extent, read.layout)
            if extent is not None:
                placed.append((extent, i))
        parts = self._submit_reads(sorted(placed), reads, until)
        try:
            results = await self._flow.settle([op for *_, op in parts], until)
            for (segment, run, which, _), result in zip(parts, results, strict=True):
                self._took(segment, run, which, result, reads, ends)
        finally:
            for segment, run, _, _ in parts:
                self._segments.unpin(segment, run)
        self.counted.update(f"reads_{end}" for end in ends)
        return ends

    def _submit_reads(self, placed: list[tuple[int, int]], reads: Sequence[Read], until: float) -> list[_Reading]:
        """One operation per run of extents that lie side by side. An extent asked for twice is in two runs."""
        parts: list[_Reading] = []
        at = 0
        longest = min((self._longest(layout, len(placed)) for layout in {reads[i].layout for _, i in placed}), default=1)
        for run in runs([extent for extent, _ in placed], longest):
            which = [i for _, i in placed[at : at + len(run)]]
            at += len(run)
            segment, place = self._place(run, reads[which[0]].layout)
            op = Op(Kind.READ, place.size, partial(read_run, place, [reads[i].into for i in which]), until)
            parts.append((segment, run, which, op))
        parts.sort(key=lambda part: min(part[2]))  # what was asked for first comes first: it may be all there is time for
        for *_, op in parts:
            self._flow.submit(op)
        return parts

    def _took(
        self,
        segment: Segment,
        run: list[int],
        which: list[int],
        result: _ReadResult | None,
        reads: Sequence[Read],
        ends: list[ReadEnd],
    ) -> None:
        if result is None:
            for i in which:
                ends[i] = ReadEnd.LATE
            return
        torn: list[int] = []
        gone: list[int] = []
        found, fault = result
        for extent, i, (end, header) in zip(run, which, found, strict=True):
            if end is ReadEnd.OK and (header is None or header.key != reads[i].key):
                end = ReadEnd.TORN  # a whole block, but not this one
            ends[i] = end
            if end is ReadEnd.TORN:
                torn.append(extent)
            elif end is ReadEnd.GONE:
                gone.append(extent)
        self.counted["mismatches_read"] += len(torn)
        self._eraser.drop(segment, torn, erase=True)
        self._eraser.drop(segment, gone, erase=False)
        self._segments.fault(segment, fault, writing=False)

    # -- freeing -----------------------------------------------------------------------------------------------------

    def free(self, extents: Iterable[int]) -> None:
        """Their space may be used again. Until it is, a restart may find the blocks once more."""
        self._segments.free(extents)

    async def erase(self, extents: Iterable[int]) -> None:
        """As ``free``, and no restart finds these blocks, nor any freed before: their headers are written over."""
        await self._eraser.erase(extents)

    async def erase_unknown(self) -> None:
        """Give up the blocks of layouts that nobody registered: what is cleared for everybody must not come back with one."""
        await self._eraser.erase_unknown()

    async def compact(self, layout: KVLayout) -> int:
        """Make room for ``layout`` by moving blocks of others together; returns the extents gained.

        ``write`` starts this by itself when it lacks room, and does not wait for it.
        """
        return await self._compactor.compact(layout)

    def numbers(self) -> dict[str, float]:
        """Gauges and counters for metrics; sizes in bytes."""
        flow = self._flow
        moved = {
            "ssd_bytes_read": flow.bytes[Kind.READ],
            "ssd_bytes_written": flow.bytes[Kind.WRITE],
            "ssd_bytes_compacted": flow.bytes[Kind.MOVE],
            "ssd_bytes_read_direct": flow.bytes[Kind.READ] if self._segments.direct else 0,
            "ssd_queue": flow.queued(),
        }
        counts = {f"ssd_{name}": value for name, value in (*self._space.counts().items(), *self.counted.items())}
        return {name: float(value) for name, value in (*moved.items(), *counts.items())}

    def words(self) -> dict[str, str]:
        """State in words, for operators."""
        return self._segments.words()

    async def quiet(self) -> None:
        """Until nothing runs beside serving: compaction, new files for lost ones, headers of torn blocks written over."""
        await self._segments.quiet()

    async def close(self) -> None:
        """Waits for what is under way. Everything written stays for the next start."""
        self._compactor.stop()
        await self._segments.quiet(CLOSE_S)
        await self._flow.close()
        await self._segments.quiet()
        self._segments.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _next_sequence(self) -> int:
        return next(self._sequence)  # called from the threads: one atomic step

    def _longest(self, layout: KVLayout, n: int) -> int:
        """Extents in one call: short enough that every thread gets some."""
        return max(1, min(-(-n // self._threads), RUN_BYTES // extent_bytes(layout), LONGEST))

    def _place(self, run: list[int], layout: KVLayout) -> tuple[Segment, Place]:
        """Pins the run."""
        segment, place = self._segments.place(run, layout)
        self._segments.pin(segment, run)
        return segment, place

    def _lost(self, extents: Sequence[int]) -> None:
        self.counted["extents_lost"] += len(extents)
        self.on_lost(extents)

    def _moved(self, moved: Mapping[int, int]) -> None:
        self.on_moved(moved)


def _require_slot(data: Bytes, layout: KVLayout) -> None:
    """Bug where direct I/O could not use it."""
    if data.nbytes != layout.slot_bytes or data.dtype != np.uint8 or data.__array_interface__["data"][0] % SLOT_ALIGN:
        raise Bug(f"a slot of {layout.slot_bytes} page-aligned bytes is needed, not {data.nbytes} bytes at that address")
