"""Extents whose blocks a restart must not find: their headers are written over. Event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from moonpool.kvstore.ssd.copying import Fault, Scratch
from moonpool.kvstore.ssd.files import SegmentFile
from moonpool.kvstore.ssd.flow import Flow, Kind, Op
from moonpool.kvstore.ssd.format import HEADER_BYTES, extent_of, offset_of, split_extent
from moonpool.kvstore.ssd.segments import Segments
from moonpool.kvstore.ssd.space import Segment

WIPES = 128  # headers written over in one operation


class Eraser:
    """``lost(extents)`` is called when blocks are no more. ``moving`` is held by compaction while it copies: an erased
    block must not survive as a copy. ``zeroise``: their bytes are written over, too.
    """

    def __init__(
        self,
        segments: Segments,
        flow: Flow,
        counted: Counter[str],
        lost: Callable[[Sequence[int]], None],
        moving: asyncio.Lock,
        zeroise: bool = False,
    ) -> None:
        self._zeroise = zeroise
        self._segments = segments
        self._space = segments.space
        self._flow = flow
        self._counted = counted
        self._lost = lost
        self._moving = moving

    def forget(self, extents: Iterable[int]) -> None:
        """Torn extents found at start: else the next start would find them again."""
        for extent in extents:
            number, position = split_extent(extent)
            self._claim(self._space.segments[number], position)
            self._segments.spawn(self._wipe(self._space.segments[number], [position]))

    def drop(self, segment: Segment, extents: Sequence[int], *, erase: bool) -> None:
        """Blocks that cannot be read; ``erase``: a restart must not find them either."""
        live = [e for e in extents if self._segments.present(segment) and self._space.at(e) is not None]
        if not live:
            return
        positions = [split_extent(extent)[1] for extent in live]
        for position in positions:
            segment.pin(position)
            segment.release(position)
        if erase:
            self._segments.spawn(self._wipe(segment, positions))
        else:
            self._segments.unpin(segment, live)
        self._lost(live)

    async def erase(self, extents: Iterable[int]) -> None:
        """Free them and write over their headers, and over every header that freed blocks left behind."""
        async with self._moving:
            self._segments.free(extents)
            work = []
            for segment in list(self._space.segments.values()):
                if segment.layout is None or self._space.unknown(segment):
                    continue
                positions = segment.remains()
                for position in positions:
                    self._claim(segment, position)
                parts = [positions[i : i + WIPES] for i in range(0, len(positions), WIPES)]
                work += [self._wipe(segment, part, must=True) for part in parts]
            await asyncio.gather(*work)

    async def erase_unknown(self) -> None:
        """Give up every segment of a layout that nobody registered."""
        for segment in [s for s in self._space.segments.values() if self._space.unknown(s)]:
            await self._segments.format(segment, None)

    def _claim(self, segment: Segment, position: int) -> None:
        """Keep a freed extent from being taken until it is unpinned."""
        segment.occupy(position)
        segment.pin(position)
        segment.release(position)

    async def _wipe(self, segment: Segment, positions: Sequence[int], *, must: bool = False) -> None:
        """Write over the headers of pinned, freed extents, then unpin them.

        ``must``: where that fails, or is given up because the tier closes, the whole file is removed.
        """
        file, layout = self._segments.file(segment), segment.layout
        fault: Fault | None = Fault.VANISHED
        if file is not None and layout is not None:
            offsets = [offset_of(position, layout) for position in positions]
            rest = layout.slot_bytes if self._zeroise else 0
            op = Op(Kind.WRITE, len(offsets) * (HEADER_BYTES + rest), partial(_write_zeros, file, offsets, rest))
            self._flow.submit(op)
            (fault,) = await self._flow.settle([op])
        if fault is Fault.NONE:
            for position in positions:
                segment.written[position] = 0
        self._segments.unpin(segment, [extent_of(segment.number, position) for position in positions])
        if fault in (Fault.ERROR, None) and must:
            self._counted["erase_failed"] += 1
            self._segments.remove(segment)
        elif fault is not None:
            self._segments.fault(segment, fault, writing=True)


def _write_zeros(file: SegmentFile, offsets: Sequence[int], rest: int, scratch: Scratch) -> Fault:
    """Over headers, and the ``rest`` bytes behind each."""
    if not file.intact():
        return Fault.VANISHED
    zeros = [scratch.header(0), *scratch.slots(1 if rest else 0, rest)]
    for part in zeros:
        part[:] = 0
    scratch.enter()
    try:
        for offset in offsets:
            file.write(zeros, offset)
    except OSError:
        return Fault.ERROR
    return Fault.NONE
