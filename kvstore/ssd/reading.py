"""Blocks out of the tier, each checked before anyone sees a byte of it. Event loop only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from moonpool.kvstore.ssd.blocks import Read, ReadEnd, require_slot
from moonpool.kvstore.ssd.copying import Fault, longest, read_run
from moonpool.kvstore.ssd.erasing import Eraser
from moonpool.kvstore.ssd.flow import Flow, Kind, Op
from moonpool.kvstore.ssd.format import ExtentHeader
from moonpool.kvstore.ssd.segments import Segments
from moonpool.kvstore.ssd.space import Segment, runs

_Result = tuple[list[tuple[ReadEnd, ExtentHeader | None]], Fault]
_Part = tuple[Segment, list[int], list[int], Op[_Result]]
"""(segment, extents of a run, which reads these are, their operation)"""


class Reader:
    def __init__(
        self,
        segments: Segments,
        eraser: Eraser,
        flow: Flow,
        threads: int,
        clock: Callable[[], float],
        counted: Counter[str],
    ) -> None:
        self._segments = segments
        self._eraser = eraser
        self._flow = flow
        self._threads = threads
        self._clock = clock
        self._counted = counted

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
            require_slot(read.into, read.layout)
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
        self._counted.update(f"reads_{end}" for end in ends)
        return ends

    def _submit_reads(self, placed: list[tuple[int, int]], reads: Sequence[Read], until: float) -> list[_Part]:
        """One operation per run of extents that lie side by side. An extent asked for twice is in two runs."""
        parts: list[_Part] = []
        at = 0
        most = min((longest(layout, len(placed), self._threads) for layout in {reads[i].layout for _, i in placed}), default=1)
        for run in runs([extent for extent, _ in placed], most):
            which = [i for _, i in placed[at : at + len(run)]]
            at += len(run)
            segment, place = self._segments.pinned(run, reads[which[0]].layout)
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
        result: _Result | None,
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
        self._counted["mismatches_read"] += len(torn)
        self._eraser.drop(segment, torn, erase=True)
        self._eraser.drop(segment, gone, erase=False)
        self._segments.fault(segment, fault, writing=False)
