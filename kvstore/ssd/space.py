"""Which extents of which segment are free. Pure: the tier acts on the answers.

A segment holds extents of one layout, or nothing yet. Where extents of a layout run out, a segment that holds none is
given to it: one without a layout, an empty one, or one whose layout nobody has registered, the longest unseen first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from moonpool.core.layout import KVLayout
from moonpool.kvstore.ssd.format import capacity, extent_of, split_extent


class Segment:
    """One segment file's extents. Each is free or taken; ``written`` ones carry a header on disk, even where free."""

    def __init__(self, number: int, size: int, layout: KVLayout | None, epoch: int, seen: int) -> None:
        self.number = number
        self.size = size
        self.layout = layout
        self.fingerprint = "" if layout is None else layout.fingerprint  # compared instead: a layout has many fields
        self.epoch = epoch
        self.seen = seen
        self.capacity = 0 if layout is None else capacity(size, layout)
        self.taken = bytearray(self.capacity)
        self.written = bytearray(self.capacity)
        self.used = 0
        self.pins: Counter[int] = Counter()
        self.doomed: set[int] = set()  # freed while somebody was reading them
        self.retired = False  # a write failed: what lies there is still read
        self.moving = False  # being emptied: nothing new goes there

    @property
    def free(self) -> int:
        """Extents that may be taken."""
        return 0 if self.retired or self.moving else self.capacity - self.used

    @property
    def idle(self) -> bool:
        """Whether it may be given to another layout."""
        return not (self.retired or self.moving or self.used)

    def take(self, n: int) -> list[int]:
        """Up to ``n`` free positions, ascending, from the lowest on."""
        out: list[int] = []
        at = -1
        while len(out) < n and (at := self.taken.find(0, at + 1)) >= 0:
            self.taken[at] = 1
            out.append(at)
        self.used += len(out)
        return out

    def occupy(self, position: int) -> None:
        """A block was found there at start."""
        self.used += not self.taken[position]
        self.taken[position] = 1

    def pin(self, position: int) -> None:
        """Keep the extent where it is while it is read or moved; ``release`` waits for the last ``unpin``."""
        self.pins[position] += 1

    def unpin(self, position: int) -> None:
        self.pins[position] -= 1
        if not self.pins[position]:
            del self.pins[position]
            if position in self.doomed:
                self.doomed.discard(position)
                self.release(position)

    def release(self, position: int) -> None:
        """The extent is free again; its header stays on disk until it is written over."""
        if position in self.pins:
            self.doomed.add(position)
        elif self.taken[position]:
            self.taken[position] = 0
            self.used -= 1

    def remains(self) -> list[int]:
        """Positions of freed blocks whose header is still on disk."""
        free = np.frombuffer(self.written, np.uint8) > np.frombuffer(self.taken, np.uint8)
        return [int(at) for at in np.flatnonzero(free)] + [at for at in sorted(self.doomed) if self.written[at]]

    def live(self) -> list[int]:
        """Positions whose block is on the tier, ascending."""
        taken = np.flatnonzero(np.frombuffer(self.taken, np.uint8))
        return [int(at) for at in taken if int(at) not in self.doomed]


class Space:
    """All segments of one tier. ``known`` layouts (fingerprints) are those somebody registered."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.known: dict[str, KVLayout] = {}
        self.read_only = False

    def put(self, segment: Segment) -> None:
        """Add it, or replace the one of its number, whose life is over."""
        self.segments[segment.number] = segment

    def of(self, layout: KVLayout) -> list[Segment]:
        fingerprint = layout.fingerprint
        return [s for s in self.segments.values() if s.fingerprint == fingerprint]

    def find(self, extent: int, layout: KVLayout) -> tuple[Segment, int] | None:
        """Where a block of ``layout`` lies; None where no such extent is taken."""
        segment = self.segments.get(split_extent(extent)[0])
        if segment is None or segment.fingerprint != layout.fingerprint:
            return None
        return self.at(extent)

    def at(self, extent: int) -> tuple[Segment, int] | None:
        """As ``find``, whatever the layout."""
        number, position = split_extent(extent)
        segment = self.segments.get(number)
        if segment is None or position >= segment.capacity:
            return None
        if not segment.taken[position] or position in segment.doomed:
            return None
        return segment, position

    def room(self, layout: KVLayout) -> int:
        """Extents of ``layout`` that can be had without freeing a block of a known layout."""
        if self.read_only:
            return 0
        own = sum(s.free for s in self.of(layout))
        return own + sum(capacity(s.size, layout) for s in self.segments.values() if self._blank(s, layout))

    def free(self, layout: KVLayout) -> int:
        """Extents that ``take`` can give at once."""
        return 0 if self.read_only else sum(s.free for s in self.of(layout))

    def take(self, layout: KVLayout, n: int) -> list[int]:
        """Up to ``n`` extents, in runs where possible; from the fullest segments, so that the emptiest ones run dry."""
        if self.read_only:
            return []
        out: list[int] = []
        for segment in sorted((s for s in self.of(layout) if s.free), key=lambda s: (s.free, s.number)):
            if len(out) == n:
                break
            out += [extent_of(segment.number, at) for at in segment.take(n - len(out))]
        return out

    def blank(self, layout: KVLayout) -> Segment | None:
        """The segment to give to ``layout`` next; what it holds (of unknown layouts only) is lost with that."""
        found = [s for s in self.segments.values() if self._blank(s, layout) and capacity(s.size, layout)]
        return min(found, key=lambda s: (s.layout is not None, s.used > 0, s.seen, s.number), default=None)

    def _blank(self, segment: Segment, layout: KVLayout) -> bool:
        if segment.fingerprint == layout.fingerprint or segment.retired or segment.moving:
            return False
        return segment.idle or self.unknown(segment)

    def unknown(self, segment: Segment) -> bool:
        return bool(segment.fingerprint) and segment.fingerprint not in self.known

    def victim(self, layout: KVLayout) -> Segment | None:
        """The emptiest segment of another layout whose blocks all fit into the free extents of that layout's others."""
        best: Segment | None = None
        free: Counter[str] = Counter()
        for segment in self.segments.values():
            free[segment.fingerprint] += 0 if self.read_only else segment.free
        for segment in self.segments.values():
            if not segment.fingerprint or segment.fingerprint == layout.fingerprint or not capacity(segment.size, layout):
                continue
            if segment.retired or segment.moving or self.unknown(segment):
                continue
            if segment.used <= free[segment.fingerprint] - segment.free and (best is None or segment.used < best.used):
                best = segment
        return best

    def counts(self) -> dict[str, int]:
        """Bytes and extents by what they are used for."""
        segments = self.segments.values()
        return {
            "bytes": sum(s.size for s in segments),
            "segments": len(self.segments),
            "extents": sum(s.used for s in segments if not self.unknown(s)),
            "extents_unknown": sum(s.used for s in segments if self.unknown(s)),
            "extents_free": 0 if self.read_only else sum(s.free for s in segments if not self.unknown(s)),
            "segments_blank": sum(s.idle and s.layout is None for s in segments),
            "segments_retired": sum(s.retired for s in segments),
        }


def runs(extents: Iterable[int], longest: int) -> list[list[int]]:
    """Extents that lie side by side, in the order given, at most ``longest`` in a run."""
    out: list[list[int]] = []
    for extent in extents:
        if out and extent == out[-1][-1] + 1 and len(out[-1]) < longest:
            out[-1].append(extent)
        else:
            out.append([extent])
    return out
