"""What a store node can be asked for: sealed blocks by key, prefix-closed, evicted leaf-first by least recent use.

Prefix-closed: a block is findable only while its parent is (first blocks have none). So whoever matches a chain of keys
may stop at the first one missing. Losing a middle block withdraws its descendants with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.core.errors import Bug
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use

EVENT_KEYS = 1024  # keys in one event, so that a batch stays far below the frame limit
BATCH_EVENTS = 16


@dataclass(slots=True, eq=False)
class Entry:
    """One sealed slot. ``busy`` counts itself if pinned, and every child that is busy: nothing busy is evicted."""

    slot: int
    key: bytes
    parent: bytes | None
    used: float
    layout: KVLayout
    use: Use
    pins: int = 0
    busy: int = 0
    findable: bool = True
    children: set[bytes] = field(default_factory=set)


class EventLog:
    """Numbered events of one life. Neighbouring changes of one kind share an event until it is taken."""

    def __init__(self, holder: NodeId, incarnation: Incarnation) -> None:
        self._holder = holder
        self._incarnation = incarnation
        self._open: list[tuple[BlockChange, list[bytes]]] = []
        self._first = 1  # number of the first event not taken yet

    @property
    def head(self) -> int:
        """Number of the newest event; 0 before the first one."""
        return self._first + len(self._open) - 1

    def record(self, change: BlockChange, key: bytes) -> None:
        if self._open and self._open[-1][0] is change and len(self._open[-1][1]) < EVENT_KEYS:
            self._open[-1][1].append(key)
        else:
            self._open.append((change, [key]))

    def take(self) -> list[EventBatch]:
        """Everything since the last call, in batches of bounded size."""
        out = []
        for i in range(0, len(self._open), BATCH_EVENTS):
            part = self._open[i : i + BATCH_EVENTS]
            events = tuple(BlockEvent(change, Tier.G2, tuple(keys)) for change, keys in part)
            out.append(EventBatch(self._holder, self._incarnation, self._first + i, events))
        self._first += len(self._open)
        self._open.clear()
        return out

    def snapshot(self, keys: Iterable[bytes]) -> IndexSnapshot:
        """``keys`` as the state after the newest event. Call with nothing left to take: an open event still grows."""
        if self._open:
            raise Bug("a snapshot was asked for while events wait to be taken")
        return IndexSnapshot(self._holder, self._incarnation, self.head, ((Tier.G2, tuple(keys)),))


class BlockIndex:
    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._found: dict[bytes, Entry] = {}  # parents before children: both were inserted in that order
        self._heap: list[tuple[float, int, Entry]] = []  # leaves that may be evicted; stale items are skipped
        self._stamp = 0  # breaks ties of the heap by age
        self._busy = 0

    def __len__(self) -> int:
        return len(self._found)

    def keys(self) -> Iterable[bytes]:
        return self._found.keys()

    def get(self, key: bytes) -> Entry | None:
        return self._found.get(key)

    def leading(self, keys: Sequence[bytes]) -> list[Entry]:
        """Entries of the leading keys that are here."""
        out: list[Entry] = []
        for key in keys:
            entry = self._found.get(key)
            if entry is None:
                break
            out.append(entry)
        return out

    @property
    def evictable(self) -> int:
        """How many blocks could be evicted, one leaf after the other."""
        return len(self._found) - self._busy

    def add(self, key: bytes, parent: bytes | None, slot: int, layout: KVLayout, use: Use, now: float) -> Entry:
        if key in self._found:
            raise Bug(f"block {key.hex()} was sealed twice")
        if parent is not None:
            if parent not in self._found:
                raise Bug(f"block {key.hex()} was sealed before its parent {parent.hex()}")
            self._found[parent].children.add(key)
        entry = self._found[key] = Entry(slot, key, parent, now, layout, use)
        self._log.record(BlockChange.STORED, key)
        self._offer(entry)
        return entry

    def pin(self, entry: Entry, now: float) -> None:
        entry.pins += 1
        entry.used = now
        if entry.pins == 1 and entry.findable:
            self._raise_busy(entry)

    def unpin(self, entry: Entry, now: float) -> bool:
        """Whether the entry's slot is to be freed: it was withdrawn, and this was its last pin."""
        if entry.pins == 0:
            raise Bug(f"block {entry.key.hex()}: unpinned more often than pinned")
        entry.pins -= 1
        entry.used = now
        if entry.pins:
            return False
        if entry.findable:
            self._lower_busy(entry)
        return not entry.findable

    def evict(self) -> Entry | None:
        """Remove the least recently used leaf that nothing holds; None if there is none."""
        while self._heap:
            used, _, entry = heapq.heappop(self._heap)
            if entry.findable and entry.used == used and not entry.busy and not entry.children:
                self._remove(entry)
                return entry
        return None

    def withdraw(self, key: bytes) -> list[Entry]:
        """Remove ``key`` and its descendants, children first. Those with pins keep their slot until the last pin ends."""
        top = self._found.get(key)
        if top is None:
            return []
        order, stack = [], [top]
        while stack:
            entry = stack.pop()
            order.append(entry)
            stack.extend(self._found[child] for child in entry.children)
        order.reverse()
        for entry in order:
            if entry.busy:  # by its own pins: its children are gone already
                self._lower_busy(entry)
            self._remove(entry)
        return order

    def _remove(self, leaf: Entry) -> None:
        del self._found[leaf.key]
        leaf.findable = False
        parent = None if leaf.parent is None else self._found[leaf.parent]
        if parent is not None:
            parent.children.discard(leaf.key)
            self._offer(parent)
        self._log.record(BlockChange.REMOVED, leaf.key)

    def _raise_busy(self, entry: Entry | None) -> None:
        while entry is not None:
            entry.busy += 1
            if entry.busy > 1:
                return
            self._busy += 1
            entry = None if entry.parent is None else self._found[entry.parent]

    def _lower_busy(self, entry: Entry | None) -> None:
        while entry is not None:
            entry.busy -= 1
            if entry.busy:
                return
            self._busy -= 1
            self._offer(entry)
            entry = None if entry.parent is None else self._found[entry.parent]

    def _offer(self, entry: Entry) -> None:
        """Make a leaf that nothing holds a candidate for eviction."""
        if entry.busy or entry.children:
            return
        if len(self._heap) > 2 * len(self._found) + 1024:  # mostly stale: start again
            self._heap = [item for item in self._heap if item[2].findable and item[2].used == item[0]]
            heapq.heapify(self._heap)
        self._stamp += 1
        heapq.heappush(self._heap, (entry.used, self._stamp, entry))
