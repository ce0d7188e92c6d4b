"""What one user of the library may ask of the pool: frames in, frames out. The pool decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from moonpool.core.errors import InvalidRequest, LayoutMismatch, MoonpoolError
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Reservation, Reserved
from moonpool.kvstore.library.elsewhere import Elsewhere, path_to
from moonpool.kvstore.library.objects import MAX_CHUNKS, RAW_LAYOUTS
from moonpool.kvstore.node_sessions import NodeSession
from moonpool.kvstore.reservations import Answers
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import STATES, Granted, Head, Kind, Link, Place, Wanted

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

_STATE = {Reserved(name): i for i, name in enumerate(STATES)}
RAISE_S = 2.0  # for blocks in lower tiers
MAX_DEADLINE_MS = 8_000  # below what a client waits for an answer
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
        self._elsewhere = Elsewhere(node)
        self._writing: dict[int, bytes] = {}  # keys of this session's reservations
        self._numbers: dict[int, int] = {}  # of the layouts of accounts
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
        layout = frames.decode_layout(frame, head.items)
        number = self._layouts.number(layout)
        return frames.encode_layout_number(head.number, number, layout.slot_bytes)

    def _exists(self, head: Head, frame: memoryview) -> bytes:
        _, keys = frames.decode_keys(frame, head.items)
        return frames.encode_bits(Kind.EXISTS, head.number, self._found(keys))

    def _found(self, keys: Sequence[bytes]) -> bytes:
        row = self._pool.held.index.row
        return bytes([row(key) is not None for key in keys])

    def _lookup(self, head: Head, frame: memoryview) -> bytes:
        _, keys = frames.decode_keys(frame, head.items)
        return frames.encode_count(Kind.LOOKUP, head.number, self._pool.lookup(keys))

    # Writing.

    def _reserve(self, head: Head, frame: memoryview) -> bytes:
        named, wanted = frames.decode_reserve(frame, head.items)
        out: list[Granted] = []
        for first, end, how in _runs(wanted):
            run = wanted[first:end]
            if how is Link.NONE:
                out += self._granted(self._reserve_apart(run))
                continue
            link = run[0].link
            parent = None if link is Link.NONE else named if link is Link.PARENT else wanted[first - 1].key
            answers = self._tied(run, parent) if how is Link.TIED else self._reserve_run(run, parent)
            out += self._granted(answers)
        self._node.changed()
        return frames.encode_granted(head.number, out)

    def _reserve_apart(self, run: Sequence[Wanted]) -> Sequence[Reservation] | Answers:
        keys = [one.key for one in run]
        if self._node.leaving.begun:
            return [Reservation(key, Reserved.FULL) for key in keys]
        layout, session = self._layouts.get(run[0].layout), self._session
        return self._pool.reservations.reserve_apart(session.number, session.life, layout, keys, self._use, self._node.clock())

    def _reserve_run(self, run: Sequence[Wanted], parent: bytes | None) -> Sequence[Reservation]:
        keys = [one.key for one in run]
        if self._node.leaving.begun:
            return [Reservation(key, Reserved.FULL) for key in keys]
        layout, session = self._layouts.get(run[0].layout), self._session
        return self._pool.reserve(session.number, session.life, layout, keys, parent, self._use, self._node.clock())

    def _tied(self, run: Sequence[Wanted], parent: bytes | None) -> Sequence[Reservation]:
        """All of ``run`` or nothing: then every answer says why."""
        leaf = run[-1].key
        why = None
        if self._pool.held.index.row(leaf) is not None:
            why = Reserved.SEALED
        elif self._pool.held.coming(leaf):
            why = Reserved.IN_FLIGHT
        elif self._can_never_fit(run):
            why = Reserved.FULL
        if why is None:
            got = self._reserve_run(run, parent)
            why = next((one.state for one in got if one.state is not Reserved.NEW), None)
            if why is None:
                return got
            if ids := [one.id for one in got if one.id]:
                self._pool.abandon(self._session.number, ids, self._node.clock())
        return [Reservation(one.key, why) for one in run]

    def _can_never_fit(self, run: Sequence[Wanted]) -> bool:
        """Even if everything else went: so nothing need be evicted to find that out."""
        size = self._layouts.get(run[0].layout).slot_bytes
        quota = self._pool.held.accounts.quotas.get(self._use.tenant)
        return len(run) > self._pool.slots.fits(size) or (quota is not None and len(run) * size > quota)

    def _granted(self, answers: Sequence[Reservation]) -> list[Granted]:
        if not isinstance(answers, Answers):
            return [Granted(_STATE[one.state], 0, 0, 0) for one in answers]
        self._writing.update((id, key) for id, key in zip(answers.ids, answers.keys, strict=True) if id)
        places = [place or (0, 0) for place in answers.places]
        each = zip(answers.states, places, answers.ids, strict=True)
        return [Granted(_STATE[state], region, offset, id) for state, (region, offset), id in each]

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

    def _pin(self, head: Head, frame: memoryview) -> bytes | None:
        """Leading blocks of one layout; those in lower tiers are brought up first."""
        number, keys = frames.decode_keys(frame, head.items)
        layout = self._layouts.get(number)
        if head.number and self._pool.held.index.on_ssd and self._pool.on_ssd(keys):
            self._node.spawn(self._raise_up(head.number, number, keys))
            return None
        return self._pinned(head.number, number, layout, keys)

    async def _raise_up(self, number: int, of_layout: int, keys: Sequence[bytes]) -> None:
        layout = self._layouts.get(of_layout)
        try:
            await self._node.bring(layout, keys, self._use, RAISE_S)
            self._node.sessions.get(self._session.number)
            frame = self._pinned(number, of_layout, layout, keys)
        except MoonpoolError as e:
            frame = frames.encode_error(number, e)
        self._later(number, frame)

    def _pinned(self, number: int, of_layout: int, layout: KVLayout, keys: Sequence[bytes]) -> bytes:
        ticket = self._pool.pin(self._session.number, keys, self._use, self._node.clock(), layout.fingerprint)
        places = [[Place(of_layout, slot.region, slot.offset)] for slot in ticket.slots]
        return frames.encode_opened(Kind.PIN, number, ticket.id if ticket.slots else 0, places)

    def _open(self, head: Head, frame: memoryview) -> bytes | None:
        """Whole values by the key of their last block: as many of those asked for as fit into an answer.

        With a deadline (milliseconds) what is not in DRAM is brought there first.
        """
        deadline_ms, keys = frames.decode_keys(frame, head.items)
        if deadline_ms and head.number and self._elsewhere.could_help(keys):
            deadline_s = min(deadline_ms, MAX_DEADLINE_MS) / 1e3
            self._node.spawn(self._bring(head.number, keys, deadline_s))
            return None
        return self._opened(head.number, keys)

    async def _bring(self, number: int, keys: Sequence[bytes], deadline_s: float) -> None:
        try:
            await self._elsewhere.bring(keys, self._use, deadline_s)
            self._node.sessions.get(self._session.number)  # it may be over by now: then nobody would unpin
            frame = self._opened(number, keys)
        except MoonpoolError as e:
            frame = frames.encode_error(number, e)
        self._later(number, frame)

    def _opened(self, number: int, keys: Sequence[bytes]) -> bytes:
        room = frames.room_for_places(len(keys))
        paths: list[list[int]] = []
        for key in keys:
            path = self._path(key)
            room -= len(path)
            if room < 0 and paths:
                break
            paths.append(path)
        index, layout = self._pool.held.index, self._layout_of
        rows = [row for path in paths for row in path]
        wanted = [index.key[row] for row in rows]
        ticket = self._pool.pin(self._session.number, wanted, self._use, self._node.clock())
        places = iter([Place(layout(row), slot.region, slot.offset) for row, slot in zip(rows, ticket.slots, strict=True)])
        opened = [list(islice(places, len(path))) for path in paths]
        return frames.encode_opened(Kind.OPEN, number, ticket.id if rows else 0, opened)

    def _path(self, key: bytes) -> list[int]:
        """Rows of the blocks that lead to ``key``, the first one first; none where not all of them are in DRAM."""
        index = self._pool.held.index
        row = index.row(key)
        if row is not None and index.parent[row] < 0:  # most values are one block
            return [row] if index.slot[row] >= 0 else []
        path = path_to(index, key)
        return path if len(path) <= MAX_CHUNKS and all(index.slot[row] >= 0 for row in path) else []

    def _layout_of(self, row: int) -> int:
        """The number of a block's layout."""
        account = self._pool.held.index.account[row]
        number = self._numbers.get(account)
        if number is None:
            number = self._numbers[account] = self._layouts.number(self._pool.held.accounts.layout_of[account])
        return number

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
        index = self._pool.held.index
        here = [key for key in keys if index.row(key) is not None]
        self._pool.clear([self._first_of(key) for key in here] if whole else here)
        self._node.changed()
        return frames.encode_count(Kind.REMOVE, head.number, self._found(here).count(0))

    def _first_of(self, key: bytes) -> bytes:
        """The block that begins the sequence of ``key``, which is here."""
        index = self._pool.held.index
        row = index.row(key)
        while row is not None and index.parent[row] >= 0:
            row = index.parent[row]
        return key if row is None else index.key[row]


def _runs(wanted: Sequence[Wanted]) -> Iterator[tuple[int, int, Link]]:
    """(first, after the last, how) of items that one reservation covers, all of one layout: TIED ones, a sequence (BEFORE),
    or blocks that each begin a sequence (NONE)."""
    at, n = 0, len(wanted)
    while at < n:
        first, end = wanted[at], at + 1
        next_link = wanted[end].link if end < n else Link.NONE
        how = next_link if next_link >= Link.BEFORE else Link.NONE if first.link is Link.NONE else Link.BEFORE
        while end < n and wanted[end].link is how and wanted[end].layout == first.layout:
            end += 1
        if how is Link.NONE and end < n and wanted[end].link >= Link.BEFORE:
            end -= 1  # the last one begins what follows; alone it would not have come here
        yield at, end, how
        at = end


class Layouts:
    """The numbers that layouts have in frames: the raw ones by size, then all others as they appear."""

    def __init__(self, register: Callable[[KVLayout], None]) -> None:
        self._register = register
        self._layouts: list[KVLayout] = list(RAW_LAYOUTS)
        self._numbers = {layout.fingerprint: i for i, layout in enumerate(RAW_LAYOUTS)}
        self._ready: set[int] = set()

    def expect_values(self) -> None:
        """Values of every size may lie in lower tiers since an earlier life: let the pool know their layouts."""
        for number in range(len(RAW_LAYOUTS)):
            with suppress(LayoutMismatch):  # a pool with regions below a chunk never held such
                self.get(number)

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
