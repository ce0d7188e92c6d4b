"""What lies in the segment files at start: headers read in large batches, the newest blocks verified in full."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.blocks import ReadEnd, Recovered
from moonpool.kvstore.ssd.copying import LONGEST, Place, Scratch, belongs, header_in, read_run
from moonpool.kvstore.ssd.files import SegmentFile, aligned
from moonpool.kvstore.ssd.flow import spare_threads
from moonpool.kvstore.ssd.format import (
    HEADER_BYTES,
    ExtentHeader,
    capacity,
    extent_bytes,
    extent_of,
    offset_of,
)

DENSE = 64 << 10  # extents up to this size are read whole: cheaper than a call for each header
BATCH_BYTES = 4 << 20
BATCH_EXTENTS = 256

Progress = Callable[[int, int], None]
"""(extents looked at so far, extents in all)"""


@dataclass(frozen=True)
class Formatted:
    """A segment file that holds extents of ``layout``."""

    file: SegmentFile
    layout: KVLayout
    epoch: int


@dataclass
class Scanned:
    """``kept`` by layout fingerprint, parents before children; ``headers`` are extents that carry one, kept or not."""

    kept: dict[str, list[Recovered]] = field(default_factory=dict)
    headers: list[int] = field(default_factory=list)
    torn: list[int] = field(default_factory=list)
    sequence: int = 0  # the highest seen
    counts: Counter[str] = field(default_factory=Counter)


def scan(segments: Sequence[Formatted], pool: Executor, in_flight: int, progress: Progress) -> Scanned:
    """``in_flight``: the last so many writes may have been cut short, and are verified in full."""
    places = [place for segment in segments for place in _batches(segment)]
    total = sum(place.count for place in places)
    found: list[ExtentHeader] = []
    done, out = 0, Scanned()
    for place, (headers, failed) in zip(places, pool.map(_headers, places), strict=True):
        found += headers
        out.counts["read_errors"] += failed
        done += place.count
        progress(done, total)
    out.sequence = max((h.sequence for h in found), default=0)
    out.headers = [extent_of(h.segment, h.position) for h in found]
    by_number = {segment.file.number: segment for segment in segments}
    recent = [h for h in found if h.sequence > out.sequence - in_flight]
    whole = list(pool.map(lambda h: _is_whole(by_number[h.segment], h), recent))
    torn = {extent_of(h.segment, h.position) for h, ok in zip(recent, whole, strict=True) if not ok}
    out.torn = sorted(torn)
    out.counts["verified_at_start"] = len(recent)
    out.counts["mismatches_start"] = len(torn)
    out.kept = choose([h for h in found if extent_of(h.segment, h.position) not in torn], out.counts)
    return out


def choose(found: Iterable[ExtentHeader], counts: Counter[str]) -> dict[str, list[Recovered]]:
    """Of each block the newest copy, where its parent is there too; by layout, parents before children."""
    newest: dict[tuple[str, bytes], ExtentHeader] = {}
    for header in sorted(found, key=lambda h: h.sequence):
        counts["duplicates_at_start"] += (header.layout, header.key) in newest
        newest[header.layout, header.key] = header
    children: dict[tuple[str, bytes | None], list[ExtentHeader]] = defaultdict(list)
    for header in newest.values():
        children[header.layout, header.parent].append(header)
    kept: dict[str, list[Recovered]] = {}
    for layout in {layout for layout, _ in newest}:
        out = kept[layout] = []
        ready = children[layout, None]
        while ready:
            header = ready.pop()
            extent = extent_of(header.segment, header.position)
            out.append(Recovered(header.key, header.parent, layout, extent, header.use))
            ready += children.pop((layout, header.key), ())
    counts["orphans_at_start"] += len(newest) - sum(len(blocks) for blocks in kept.values())
    return kept


def _batches(segment: Formatted) -> list[Place]:
    total = capacity(segment.file.size, segment.layout)
    one = extent_bytes(segment.layout)
    step = max(1, BATCH_BYTES // one) if one <= DENSE else BATCH_EXTENTS
    return [
        Place(segment.file, segment.layout, segment.epoch, first, min(step, total - first)) for first in range(0, total, step)
    ]


def _headers(place: Place) -> tuple[list[ExtentHeader], int]:
    """Headers of a stretch of extents, and how many could not be read."""
    one = extent_bytes(place.layout)
    dense = one <= DENSE
    memory = aligned(place.size if dense else HEADER_BYTES)
    failed = 0
    out: list[ExtentHeader] = []
    if dense:
        try:
            place.file.read([memory], place.offset)
        except OSError:
            return [], place.count
    for i in range(place.count):
        at = i * one if dense else 0
        if not dense:
            try:
                memory[:] = 0
                place.file.read([memory], offset_of(place.first + i, place.layout))
            except OSError:
                failed += 1
                continue
        header = header_in(memory[at : at + HEADER_BYTES], place.file)
        if header is not None and belongs(header, place, place.first + i):
            out.append(header)
    return out, failed


def _is_whole(segment: Formatted, header: ExtentHeader) -> bool:
    place = Place(segment.file, segment.layout, segment.epoch, header.position, 1)
    ends, _ = read_run(place, [aligned(segment.layout.slot_bytes)], Scratch(headers=aligned(HEADER_BYTES)))
    return ends[0][0] is ReadEnd.OK


def in_flight(threads: int) -> int:
    """Writes that may have been under way when the process was killed: threads that still check blocks have numbered them.

    A write that stalls while others go through may be older still: like every block it is checked when it is read.
    """
    return (threads + spare_threads(threads)) * LONGEST
