"""The tier's segments while it runs: giving them layouts, dropping extents, losing and replacing files. Event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.copying import Fault, Place, Scratch
from moonpool.kvstore.ssd.device import Device, size_words
from moonpool.kvstore.ssd.files import SegmentFile
from moonpool.kvstore.ssd.flow import Flow, Kind, Op
from moonpool.kvstore.ssd.format import HEADER_BYTES, SegmentHeader, encode_segment, extent_of, split_extent
from moonpool.kvstore.ssd.opening import SEEN_S, Opened, make_segment
from moonpool.kvstore.ssd.space import Segment

RETIRED_READ_ONLY = 3  # segments with failed writes: the disk, not a place on it
FORWARDS = 1 << 16  # moved extents whose old number is still understood


class Segments:
    """``lost(extents)`` is called when blocks are no more."""

    def __init__(
        self,
        opened: Opened,
        flow: Flow,
        sequence: Callable[[], int],
        wall: Callable[[], float],
        counted: Counter[str],
        lost: Callable[[Sequence[int]], None],
    ) -> None:
        self.space = opened.space
        self._opened = opened
        self._files = opened.files
        self._flow = flow
        self._sequence = sequence
        self._wall = wall
        self._counted = counted
        self._lost = lost
        self._formatting = asyncio.Lock()
        self._replacing = asyncio.Lock()
        self._forwards: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run it beside serving; ``quiet`` waits for it. An exception of it is a bug and reaches the loop's handler."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- where things lie --------------------------------------------------------------------------------------------

    @property
    def direct(self) -> bool:
        return bool(self._files) and all(file.direct for file in self._files.values())

    def present(self, segment: Segment) -> bool:
        return self.space.segments.get(segment.number) is segment

    def place(self, run: Sequence[int], layout: KVLayout) -> tuple[Segment, Place]:
        number, first = split_extent(run[0])
        segment = self.space.segments[number]
        return segment, Place(self._files[number], layout, segment.epoch, first, len(run))

    def resolve(self, extent: int, layout: KVLayout) -> int | None:
        """The extent where that block lies now; None where it is no more."""
        while self.space.find(extent, layout) is None:
            moved = self._forwards.get(extent)
            if moved is None:
                return None
            extent = moved
        return extent

    def forward(self, old: int, new: int) -> None:
        self._forwards[old] = new
        if len(self._forwards) > FORWARDS:
            del self._forwards[next(iter(self._forwards))]

    def filling(self, run: Iterable[int]) -> None:
        """These extents are about to be written: what their numbers meant before is over."""
        for extent in run:
            self._forwards.pop(extent, None)
            number, position = split_extent(extent)
            self.space.segments[number].written[position] = 1

    def pinned(self, run: Sequence[int], layout: KVLayout) -> tuple[Segment, Place]:
        """As ``place``, and the run stays where it is until it is unpinned."""
        segment, place = self.place(run, layout)
        self.pin(segment, run)
        return segment, place

    def pin(self, segment: Segment, run: Iterable[int]) -> None:
        for extent in run:
            segment.pin(split_extent(extent)[1])

    def unpin(self, segment: Segment, run: Iterable[int]) -> None:
        for extent in run:
            segment.unpin(split_extent(extent)[1])
        self.let_go(segment)

    # -- layouts -----------------------------------------------------------------------------------------------------

    def know(self, layout: KVLayout) -> None:
        self.space.known[layout.fingerprint] = layout
        now = int(self._wall())
        for segment in self.space.of(layout):
            if now - segment.seen > SEEN_S:
                segment.seen = now
                self.spawn(self._note_seen(segment))

    async def _note_seen(self, segment: Segment) -> None:
        await self._write_header(
            segment, SegmentHeader(segment.number, segment.size, segment.epoch, segment.seen, segment.layout)
        )

    async def prepare(self, layout: KVLayout, n: int) -> None:
        """Give ``layout`` segments until it has ``n`` free extents, or no segment can be given."""
        while self.space.free(layout) < n:
            async with self._formatting:
                segment = self.space.blank(layout)
                if segment is None or self.space.free(layout) >= n:
                    return
                await self.format(segment, layout)

    async def format(self, segment: Segment, layout: KVLayout | None) -> None:
        """Give an idle segment, or one of an unknown layout, to ``layout`` or to nobody. Where that fails it is retired.

        Once begun it goes on when the caller is cancelled: disk and memory must agree on whose segment it is.
        """
        segment.moving = True
        await asyncio.shield(self.spawn(self._format(segment, layout)))

    async def _format(self, segment: Segment, layout: KVLayout | None) -> None:
        life = Segment(segment.number, segment.size, layout, self._sequence(), int(self._wall()))
        ok = await self._write_header(segment, SegmentHeader(life.number, life.size, life.epoch, life.seen, layout))
        segment.moving = False
        if not self.present(segment):
            self.let_go(segment)
        elif ok:
            self._counted["segments_formatted"] += 1
            self._counted["extents_forgotten"] += segment.used
            live = [extent_of(segment.number, at) for at in segment.live()] if not self.space.unknown(segment) else []
            self.space.put(life)
            if live:  # its layout was registered while the header was being written
                self._lost(live)

    async def _write_header(self, segment: Segment, header: SegmentHeader) -> bool:
        file = self._files.get(segment.number)
        if file is None:
            return False
        header = replace(header, sealed=file.vault is not None)
        op = Op(Kind.WRITE, HEADER_BYTES, partial(_write_header, file, encode_segment(header)))
        self._flow.submit(op)
        (fault,) = await self._flow.settle([op])
        if fault is not None:
            self.fault(segment, fault, writing=True)
        return fault is Fault.NONE

    def file(self, segment: Segment) -> SegmentFile | None:
        """None where it is lost."""
        return self._files.get(segment.number) if self.present(segment) else None

    def free(self, extents: Iterable[int]) -> None:
        for extent in extents:
            found = self.find(extent)
            if found is not None:
                found[0].release(found[1])

    def find(self, extent: int) -> tuple[Segment, int] | None:
        """Where it lies now, whatever its layout."""
        while (found := self.space.at(extent)) is None:
            moved = self._forwards.get(extent)
            if moved is None:
                return None
            extent = moved
        return found

    # -- faults ------------------------------------------------------------------------------------------------------

    def fault(self, segment: Segment, fault: Fault, *, writing: bool) -> None:
        """What an operation learned about its segment file."""
        if fault is Fault.ERROR:
            self._counted["write_errors" if writing else "read_errors"] += 1
            if writing and not segment.retired:
                segment.retired = True
                retired = sum(s.retired for s in self.space.segments.values())
                self.space.read_only = retired >= min(RETIRED_READ_ONLY, len(self.space.segments))
        elif fault is Fault.VANISHED and self.present(segment):
            for other in list(self.space.segments.values()):  # whoever removed one may have removed all
                if not self._files[other.number].intact():
                    self.lose(other)

    def remove(self, segment: Segment) -> None:
        """Give up the file with all that lies in it."""
        file = self.file(segment)
        if file is not None:
            file.path.unlink(missing_ok=True)
            self.lose(segment)

    def lose(self, segment: Segment) -> None:
        """The file is gone, and all that lay in it. A new one takes its place, under a new number."""
        if not self.present(segment):
            return
        del self.space.segments[segment.number]
        self._counted["segments_lost"] += 1
        live = [] if self.space.unknown(segment) else [extent_of(segment.number, at) for at in segment.live()]
        self.let_go(segment)
        if live:
            self._lost(live)

    def let_go(self, segment: Segment) -> None:
        """Close a lost segment's file once no thread is inside it, and make a new one: only now is its space free."""
        if not self.present(segment) and not segment.pins and not segment.moving:
            file = self._files.get(segment.number)
            if file is not None and segment.number not in self.space.segments:
                del self._files[segment.number]
                file.close()
                self.spawn(self._replace(segment.size))

    async def _replace(self, size: int) -> None:
        opened = self._opened
        number = opened.next_number
        opened.next_number += 1
        try:
            async with self._replacing:
                file = await asyncio.to_thread(_restored, opened, number, size, int(self._wall()))
        except OSError as e:
            opened.notes.append(f"a lost segment could not be made again: {e.strerror}")
            return
        self._files[number] = file
        self.space.put(Segment(number, size, None, 0, int(self._wall())))

    # -- the rest ----------------------------------------------------------------------------------------------------

    def words(self) -> dict[str, str]:
        space, files = self.space, self._files.values()
        has = sum(s.size for s in space.segments.values())
        state = "read-only after failed writes" if space.read_only else "in use"
        retired = sum(s.retired for s in space.segments.values())
        if retired and not space.read_only:
            state += f", {retired} segments take no more writes"
        words = {
            "ssd": f"{self._opened.folder.path}: {state}",
            "ssd_io": "direct" if self.direct else "through the page cache" if files else "none",
            "ssd_size": f"{has >> 20} MiB in {len(space.segments)} segments, of {self._opened.cap >> 20} MiB asked for",
        }
        if not all(file.allocated for file in files):
            words["ssd_size"] += ", not set aside: this file system cannot"
        if self._opened.notes:
            words["ssd_notes"] = "; ".join(self._opened.notes[-4:])
        return words

    def line(self, blocks: int) -> str:
        """For the screen, at start; ``blocks`` were found."""
        segments = self.space.segments.values()
        has, cap = sum(s.size for s in segments), self._opened.cap
        out = f"ssd: {size_words(has)} at {self._opened.folder.path}, {len(segments)} segments, {blocks} blocks found"
        notes = "; ".join(self._opened.notes[-4:])
        return f"{out} ({size_words(cap)} asked for; {notes})" if notes else out

    async def quiet(self, limit_s: float | None = None) -> None:
        """Until nothing runs beside serving, or the time is over."""
        until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        while self._tasks:
            left = None if until is None else until - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
                return
            await asyncio.wait(self._tasks, timeout=left)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self.space.segments.clear()
        self._opened.folder.close()


def _restored(opened: Opened, number: int, size: int, now: int) -> SegmentFile:
    opened.folder.restore()
    Device.of(opened.folder.path).require(size)
    return make_segment(opened.folder, number, size, now)


def _write_header(file: SegmentFile, raw: bytes, scratch: Scratch) -> Fault:
    if not file.intact():
        return Fault.VANISHED
    scratch.enter()
    try:
        scratch.header(0)[:] = np.frombuffer(raw, dtype=np.uint8)
        file.write([scratch.header(0)], 0)
    except OSError:
        return Fault.ERROR
    return Fault.NONE
