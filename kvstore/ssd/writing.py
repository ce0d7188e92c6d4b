"""Blocks into the tier. Event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.blocks import Write, require_slot
from moonpool.kvstore.ssd.copying import Fault, WriteEnd, longest, write_run
from moonpool.kvstore.ssd.flow import Flow, Kind, Op
from moonpool.kvstore.ssd.format import split_extent, writable
from moonpool.kvstore.ssd.segments import Segments
from moonpool.kvstore.ssd.space import Segment, runs


class Writer:
    """``lacks_room(layout)`` is called when blocks of that layout find none."""

    def __init__(
        self,
        segments: Segments,
        flow: Flow,
        threads: int,
        sequence: Callable[[], int],
        counted: Counter[str],
        lacks_room: Callable[[KVLayout], None],
    ) -> None:
        self._segments = segments
        self._space = segments.space
        self._flow = flow
        self._threads = threads
        self._next_sequence = sequence
        self._counted = counted
        self._lacks_room = lacks_room

    async def write(self, blocks: Sequence[Write]) -> list[int | None]:
        """The extent of each block, or None: no room, or it could not be written. Parents before children, please."""
        out: list[int | None] = [None] * len(blocks)
        by_layout: dict[KVLayout, list[int]] = defaultdict(list)
        for i, block in enumerate(blocks):
            require_slot(block.data, block.layout)
            if writable(block.layout, block.key, block.parent, block.use):
                by_layout[block.layout].append(i)
            else:
                self._counted["writes_unfit"] += 1
        try:
            for layout, places in by_layout.items():
                await self._write_layout(layout, [blocks[i] for i in places], places, out)
        except asyncio.CancelledError:
            self._segments.free(extent for extent in out if extent is not None)  # nobody will learn of them
            raise
        where = self._segments.resolve  # files may have gone, and blocks moved, since the first of these was written
        return [None if extent is None else where(extent, block.layout) for extent, block in zip(out, blocks, strict=True)]

    async def _write_layout(self, layout: KVLayout, blocks: list[Write], places: list[int], out: list[int | None]) -> None:
        await self._segments.prepare(layout, len(blocks))
        extents = self._space.take(layout, len(blocks))
        if len(extents) < len(blocks):
            self._counted["writes_without_room"] += len(blocks) - len(extents)
            self._lacks_room(layout)
        parts: list[tuple[Segment, list[int], list[int], Op[tuple[list[WriteEnd], Fault]]]] = []
        at = 0
        for run in runs(extents, longest(layout, len(extents), self._threads)):
            segment, place = self._segments.pinned(run, layout)
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
                self._counted["mismatches_write" if end is WriteEnd.MISMATCH else "writes_failed"] += 1
        self._counted["blocks_written"] += ends.count(WriteEnd.OK)
        self._segments.unpin(segment, run)
        self._segments.fault(segment, fault, writing=True)
        if not self._segments.present(segment):
            for i in places:
                out[i] = None
