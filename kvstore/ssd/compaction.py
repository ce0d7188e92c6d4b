"""Making room for one layout where the free extents lie scattered over segments of another. Event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.blocks import ReadEnd
from moonpool.kvstore.ssd.copying import LONGEST, Fault, Moved, move
from moonpool.kvstore.ssd.erasing import Eraser
from moonpool.kvstore.ssd.flow import Flow, Kind, Op
from moonpool.kvstore.ssd.format import extent_bytes, extent_of, split_extent
from moonpool.kvstore.ssd.segments import Segments
from moonpool.kvstore.ssd.space import Segment, runs

MOVE_BYTES = 1 << 20  # most bytes copied between two looks at what has changed meanwhile


class Compactor:
    """``moved({from: to})`` is called when blocks lie elsewhere. ``moving`` is held while blocks are being copied."""

    def __init__(
        self,
        segments: Segments,
        eraser: Eraser,
        flow: Flow,
        sequence: Callable[[], int],
        counted: Counter[str],
        moved: Callable[[Mapping[int, int]], None],
        moving: asyncio.Lock,
    ) -> None:
        self._segments = segments
        self._space = segments.space
        self._eraser = eraser
        self._flow = flow
        self._sequence = sequence
        self._counted = counted
        self._moved = moved
        self._moving = moving
        self._one = asyncio.Lock()  # one segment is emptied at a time
        self._stopped = False

    def want(self, layout: KVLayout) -> None:
        """Make room beside serving, unless somebody is at it."""
        if not self._one.locked() and self._space.victim(layout) is not None:
            self._segments.spawn(self._beside(layout))

    async def _beside(self, layout: KVLayout) -> None:
        await self.compact(layout)

    async def compact(self, layout: KVLayout) -> int:
        """Empty one segment of another layout and give it to ``layout``; returns the extents gained, 0 where none could be."""
        async with self._one:
            before = self._space.room(layout)
            victim = self._space.victim(layout)
            if victim is None or victim.layout is None:
                return 0
            victim.moving = True
            try:
                await self._empty(victim, victim.layout)
            finally:
                victim.moving = False
                self._segments.let_go(victim)
            if victim.idle and self._segments.present(victim):
                await self._segments.format(victim, layout)
                self._counted["segments_compacted"] += 1
            return max(0, self._space.room(layout) - before)

    def stop(self) -> None:
        """No further runs are copied."""
        self._stopped = True

    async def _empty(self, victim: Segment, layout: KVLayout) -> None:
        step = max(1, min(LONGEST, MOVE_BYTES // extent_bytes(layout)))
        live = [extent_of(victim.number, at) for at in victim.live()]
        for first in range(0, len(live), step):
            async with self._moving:
                left = [extent for extent in live[first : first + step] if self._space.find(extent, layout) is not None]
                if self._stopped or not self._segments.present(victim) or not await self._move(victim, left, layout):
                    return

    async def _move(self, victim: Segment, old: list[int], layout: KVLayout) -> bool:
        """False where it makes no sense to go on."""
        new = self._space.take(layout, len(old))
        old, whole = old[: len(new)], len(new) == len(old)
        if not old:
            return whole
        self._segments.filling(new)
        sources = [self._segments.place(run, layout)[1] for run in runs(old, LONGEST)]
        targets = [(run, *self._segments.place(run, layout)) for run in runs(new, LONGEST)]
        self._segments.pin(victim, old)
        for run, segment, _ in targets:
            self._segments.pin(segment, run)
        size = 2 * sum(place.size for place in sources)
        op = Op(Kind.MOVE, size, partial(move, sources, [place for *_, place in targets], self._sequence))
        self._flow.submit(op)
        try:
            await self._flow.settle([op])
        finally:
            result = op.future.result() or Moved([ReadEnd.LATE] * len(old), [False] * len(old))
            self._tell(victim, old, new, result)
            self._segments.unpin(victim, old)
            for run, segment, _ in targets:
                self._segments.unpin(segment, run)
        for fault in result.read_faults:
            self._segments.fault(victim, fault, writing=False)
        for (_, segment, _), fault in zip(targets, result.write_faults, strict=False):
            self._segments.fault(segment, fault, writing=True)
        return whole and set(result.write_faults) == {Fault.NONE}

    def _tell(self, victim: Segment, old: list[int], new: list[int], result: Moved) -> None:
        """Old extents of what was moved are free, and so are new ones of what was not, or was freed meanwhile."""
        moved: dict[int, int] = {}
        for source, target, there in zip(old, new, result.there, strict=True):
            segment = self._space.segments.get(split_extent(target)[0])
            if segment is None:
                continue  # its file was lost
            if there and self._segments.present(victim) and self._space.at(source) is not None:
                moved[source] = target
                self._segments.forward(source, target)
                victim.release(split_extent(source)[1])
            else:
                segment.release(split_extent(target)[1])
        torn = [extent for extent, end in zip(old, result.ends, strict=True) if end is ReadEnd.TORN]
        gone = [extent for extent, end in zip(old, result.ends, strict=True) if end is ReadEnd.GONE]
        self._counted["mismatches_move"] += len(torn)
        self._counted["blocks_moved"] += len(moved)
        self._eraser.drop(victim, torn, erase=True)
        self._eraser.drop(victim, gone, erase=False)
        if moved:
            self._moved(moved)
