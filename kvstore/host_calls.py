"""What one user of the library may ask of the pool: frames in, frames out. The pool decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from moonpool.core.errors import InvalidRequest
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Reservation, Reserved
from moonpool.kvstore.node_sessions import NodeSession
from moonpool.kvstore.objects import MAX_CHUNKS, RAW_LAYOUTS
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import STATES, Granted, Head, Kind, Link, Place, Wanted

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

_STATE = {Reserved(name): i for i, name in enumerate(STATES)}
Later = Callable[[int, bytes], None]


class HostCalls:
    """Event-loop only. ``later(number, frame)`` answers what could not be answered at once."""

    def __init__(self, node: StoreNode, session: NodeSession, use: Use, layouts: Layouts, later: Later) -> None:
        self._node = node
        self._pool = node.pool
        self._session = session
        self._use = use
        self._layouts = layouts
        self._later = later
        self._writing: dict[int, bytes] = {}  # keys of this session's reservations
        self._handlers: dict[Kind, Callable[[Head, memoryview], bytes | None]] = {
            Kind.REGIONS: self._regions,
            Kind.LAYOUT: self._layout,
            Kind.EXISTS: self._exists,
            Kind.LOOKUP: self._lookup,
            Kind.RESERVE: self._reserve,
            Kind.SEAL: self._seal,
            Kind.ABANDON: self._abandon,
            Kind.PIN: self._pin,
            Kind.OPEN: self._open,
            Kind.UNPIN: self._unpin,
            Kind.QUARANTINE: self._quarantine,
            Kind.REMOVE: self._remove,
        }

    def answer(self, head: Head, frame: memoryview) -> bytes | None:
        """The answer, or None where it comes later. InvalidRequest: ``frame`` is malformed."""
        handler = self._handlers.get(head.kind)
        if handler is None:
            raise InvalidRequest(f"frame: {head.kind.name} is not asked here")
        return handler(head, frame)

    # Facts.

    def _regions(self, head: Head, frame: memoryview) -> bytes:
        first = frames.decode_count(frame)
        return frames.encode_regions(head.number, self._node.regions.files[first : first + frames.REGIONS_AT_ONCE])

    def _layout(self, head: Head, frame: memoryview) -> bytes:
        layout = frames.decode_layout(frame)
        number = self._layouts.number(layout)
        return frames.encode_layout_number(head.number, number, layout.slot_bytes)

    def _exists(self, head: Head, frame: memoryview) -> bytes:
        _, keys = frames.decode_keys(frame, head.items)
        return frames.encode_bits(Kind.EXISTS, head.number, self._found(keys))

    def _found(self, keys: Sequence[bytes]) -> bytes:
        get = self._pool.held.index.get
        return bytes([get(key) is not None for key in keys])

    def _lookup(self, head: Head, frame: memoryview) -> bytes:
        _, keys = frames.decode_keys(frame, head.items)
        return frames.encode_count(Kind.LOOKUP, head.number, self._pool.lookup(keys))

    # Writing.

    def _reserve(self, head: Head, frame: memoryview) -> bytes:
        named, wanted = frames.decode_reserve(frame, head.items)
        out: list[Granted] = []
        for first, end in _runs(wanted):
            link = wanted[first].link
            parent = None if link is Link.NONE else named if link is Link.PARENT else wanted[first - 1].key
            run = wanted[first:end]
            tied = end - first > 1 and run[1].link is Link.TIED
            answers = self._tied(run, parent) if tied else self._reserve_run(run, parent)
            out += [self._granted(one) for one in answers]
        self._node.changed()
        return frames.encode_granted(head.number, out)

    def _reserve_run(self, run: Sequence[Wanted], parent: bytes | None) -> Sequence[Reservation]:
        keys = [one.key for one in run]
        if self._node.leaving.begun:
            return [Reservation(key, Reserved.FULL) for key in keys]
        layout = self._layouts.get(run[0].layout)
        session = self._session
        return self._pool.reserve(session.number, session.life, layout, keys, parent, self._use, self._node.clock())

    def _tied(self, run: Sequence[Wanted], parent: bytes | None) -> Sequence[Reservation]:
        """All of ``run`` or nothing: then every answer says why."""
        leaf = run[-1].key
        why = None
        if self._pool.held.index.get(leaf) is not None:
            why = Reserved.SEALED
        elif self._pool.held.coming(leaf):
            why = Reserved.IN_FLIGHT
        if why is None:
            got = self._reserve_run(run, parent)
            why = next((one.state for one in got if one.state is not Reserved.NEW), None)
            if why is None:
                return got
            if ids := [one.id for one in got if one.id]:
                self._pool.abandon(self._session.number, ids, self._node.clock())
        return [Reservation(one.key, why) for one in run]

    def _granted(self, one: Reservation) -> Granted:
        if one.slot is None:
            return Granted(_STATE[one.state], 0, 0, 0)
        self._writing[one.id] = one.key
        return Granted(_STATE[one.state], one.slot.region, one.slot.offset, one.id)

    def _seal(self, head: Head, frame: memoryview) -> bytes:
        ids = frames.decode_ids(frame, head.items)
        sealed = self._pool.seal(self._session.number, ids, self._node.clock())
        keys = [self._writing.pop(id, b"") for id in ids]
        self._node.changed()
        found = bytes([1]) * len(ids) if sealed == len(ids) else self._found(keys)
        return frames.encode_bits(Kind.SEAL, head.number, found)

    def _abandon(self, head: Head, frame: memoryview) -> bytes:
        ids = frames.decode_ids(frame, head.items)
        count = self._pool.abandon(self._session.number, ids, self._node.clock())
        for id in ids:
            self._writing.pop(id, None)
        self._node.changed()
        return frames.encode_count(Kind.ABANDON, head.number, count)

    # Reading.

    def _pin(self, head: Head, frame: memoryview) -> bytes:
        """Leading blocks of one layout."""
        number, keys = frames.decode_keys(frame, head.items)
        layout = self._layouts.get(number)
        ticket = self._pool.pin(self._session.number, keys, self._use, self._node.clock(), layout.fingerprint)
        places = [[Place(number, slot.region, slot.offset)] for slot in ticket.slots]
        return frames.encode_opened(Kind.PIN, head.number, ticket.id if ticket.slots else 0, places)

    def _open(self, head: Head, frame: memoryview) -> bytes:
        """Whole values by the key of their last block: as many of those asked for as fit into an answer."""
        _, keys = frames.decode_keys(frame, head.items)
        room = frames.room_for_places(len(keys))
        paths: list[list[bytes]] = []
        for key in keys:
            path = self._path(key)
            room -= len(path)
            if room < 0 and paths:
                break
            paths.append(path)
        wanted = list(dict.fromkeys(key for path in paths for key in path))
        ticket = self._pool.pin(self._session.number, wanted, self._use, self._node.clock())
        where = dict(zip(wanted, ticket.slots, strict=False))
        opened = []
        for path in paths:
            whole = all(key in where for key in path)
            opened.append([self._place(key, where[key].region, where[key].offset) for key in path] if whole else [])
        return frames.encode_opened(Kind.OPEN, head.number, ticket.id if ticket.slots else 0, opened)

    def _path(self, key: bytes) -> list[bytes]:
        """The blocks that lead to ``key``, the first one first; none where it is not here or the way is too long."""
        index = self._pool.held.index
        path: list[bytes] = []
        at: bytes | None = key
        while at is not None and len(path) <= MAX_CHUNKS:
            entry = index.get(at)
            if entry is None:
                return []
            path.append(at)
            at = entry.parent
        return path[::-1] if at is None else []

    def _place(self, key: bytes, region: int, offset: int) -> Place:
        entry = self._pool.held.index.get(key)
        return Place(0 if entry is None else self._layouts.number(entry.layout), region, offset)

    def _unpin(self, head: Head, frame: memoryview) -> bytes:
        ended = 0
        for ticket in frames.decode_ids(frame, head.items):
            ended += self._pool.unpin(self._session.number, ticket, self._node.clock())
        if ended:
            self._node.changed()
        return frames.encode_count(Kind.UNPIN, head.number, ended)

    def _quarantine(self, head: Head, frame: memoryview) -> bytes:
        key, _, place = frames.decode_quarantine(frame)
        gone = self._pool.quarantine(key, place or "unnamed")
        self._node.changed()
        return frames.encode_count(Kind.QUARANTINE, head.number, gone)

    def _remove(self, head: Head, frame: memoryview) -> bytes:
        """Whole values (word 1), or blocks with all that follow them (word 0)."""
        whole, keys = frames.decode_keys(frame, head.items)
        here = [key for key in keys if self._pool.held.index.get(key) is not None]
        for key in here:
            path = self._path(key) if whole else [key]
            self._pool.clear(path[:1])
        self._node.changed()
        return frames.encode_count(Kind.REMOVE, head.number, self._found(here).count(0))


def _runs(wanted: Sequence[Wanted]) -> Iterator[tuple[int, int]]:
    """(first, after the last) of items that one reservation covers: tied ones, or a sequence in one layout."""
    at = 0
    while at < len(wanted):
        end = at + 1
        if end < len(wanted) and wanted[end].link is Link.TIED:
            while end < len(wanted) and wanted[end].link is Link.TIED:
                end += 1
        else:
            while end < len(wanted) and wanted[end].link is Link.BEFORE and wanted[end].layout == wanted[at].layout:
                end += 1
        yield at, end
        at = end


class Layouts:
    """The numbers that layouts have in frames: the raw ones by size, then all others as they appear."""

    def __init__(self, register: Callable[[KVLayout], None]) -> None:
        self._register = register
        self._layouts: list[KVLayout] = list(RAW_LAYOUTS)
        self._numbers = {layout.fingerprint: i for i, layout in enumerate(RAW_LAYOUTS)}
        self._ready: set[int] = set()

    def number(self, layout: KVLayout) -> int:
        """LayoutMismatch where the pool cannot take such blocks."""
        number = self._numbers.get(layout.fingerprint)
        if number is None:
            self._register(layout)
            number = self._numbers[layout.fingerprint] = len(self._layouts)
            self._layouts.append(layout)
            self._ready.add(number)
        return number

    def get(self, number: int) -> KVLayout:
        """The layout, which the pool knows from now on. InvalidRequest where the number was not given out."""
        if number >= len(self._layouts):
            raise InvalidRequest(f"frame: layout {number} is unknown")
        if number not in self._ready:
            self._register(self._layouts[number])
            self._ready.add(number)
        return self._layouts[number]
