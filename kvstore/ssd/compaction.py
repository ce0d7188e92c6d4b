"""Making room for one layout where the free extents lie scattered over segments of another. Event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.blocks import ReadEnd
from moonpool.kvstore.ssd.copying import LONGEST, Fault, Moved, move_run
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
        for run in runs([extent_of(victim.number, at) for at in victim.live()], step):
            async with self._moving:
                left = [extent for extent in run if self._space.find(extent, layout) is not None]
                for part in runs(left, step):
                    if self._stopped or not self._segments.present(victim) or not await self._move(victim, part, layout):
                        return

    async def _move(self, victim: Segment, run: list[int], layout: KVLayout) -> bool:
        """False where it makes no sense to go on."""
        taken = self._space.take(layout, len(run))
        if not taken:
            return False
        run = run[: len(taken)]
        self._segments.filling(taken)
        targets = [(part, *self._segments.place(part, layout)) for part in runs(taken, LONGEST)]
        for part, segment, _ in targets:
            self._segments.pin(segment, part)
        self._segments.pin(victim, run)
        _, source = self._segments.place(run, layout)
        op = Op(Kind.MOVE, 2 * source.size, partial(move_run, source, [place for *_, place in targets], self._sequence))
        self._flow.submit(op)
        try:
            await self._flow.settle([op])
        finally:
            result = op.future.result()
            if result is None:
                for part, segment, _ in targets:
                    for extent in part:
                        segment.release(split_extent(extent)[1])
            else:
                self._tell(victim, run, taken, result)
            self._segments.unpin(victim, run)
            for part, segment, _ in targets:
                self._segments.unpin(segment, part)
            if result is not None:
                self._segments.fault(victim, result.read_fault, writing=False)
                for (_, segment, _), fault in zip(targets, result.write_faults, strict=True):
                    self._segments.fault(segment, fault, writing=True)
        return result is not None and not any(result.write_faults[i] is not Fault.NONE for i in range(len(targets)))

    def _tell(self, victim: Segment, run: list[int], taken: list[int], result: Moved) -> None:
        moved: dict[int, int] = {}
        for old, new, target in zip(run, taken, result.targets, strict=True):
            segment = self._space.segments.get(split_extent(new)[0])
            if target is not None and segment is not None and self._space.find(old, target[0].layout) is not None:
                moved[old] = new
                self._segments.forward(old, new)
                victim.release(split_extent(old)[1])
            elif segment is not None:
                segment.release(split_extent(new)[1])
        torn = [e for e, end in zip(run, result.ends, strict=True) if end is ReadEnd.TORN]
        gone = [e for e, end in zip(run, result.ends, strict=True) if end is ReadEnd.GONE]
        self._counted["mismatches_move"] += len(torn)
        self._counted["blocks_moved"] += len(moved)
        self._eraser.drop(victim, torn, erase=True)
        self._eraser.drop(victim, gone, erase=False)
        if moved:
            self._moved(moved)
