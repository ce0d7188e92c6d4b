"""Device pages (tier G1): reference counts, a prefix index, and which page to give up next. Pure.

A page is *free* (no content), *used* (somebody holds it) or *cached* (nobody holds it, but its key makes it findable).
The index is prefix-closed: a key is findable only while its parent is, so a match is a leading run. Evicting takes the
least recently released page without findable children first; where every cached page has such a child (a sequence holds
a private copy of the parent), the oldest one goes and its descendants are withdrawn from the index.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.core.errors import Bug
from moonpool.core.events import BlockChange, BlockEvent, Tier
from moonpool.core.hits import usable


class OutOfPages(Exception):
    """Fewer pages are free or cached than were asked for; nothing was taken."""


@dataclass(slots=True)
class _Entry:
    """A findable block."""

    page: int
    key: bytes
    parent: bytes | None
    children: set[bytes] = field(default_factory=set)


class PagePool:
    """Pages ``0 .. pages - 1``. Not thread-safe: one owner."""

    def __init__(self, pages: int, on_free: Callable[[Sequence[int]], None] | None = None, *, quantum: int = 1) -> None:
        """``on_free`` is told of pages whose content died, before they can be handed out again. A match counts in multiples
        of ``quantum`` pages."""
        self.total = pages
        self.quantum = quantum
        self._on_free = on_free
        self._free = list(range(pages - 1, -1, -1))  # a stack: low pages first, so that a quiet worker touches few
        self._refs = [0] * pages
        self._by_key: dict[bytes, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self._cached = 0
        self._clock = 0
        self._stamp = [0] * pages  # when a page was last released
        self._leaves: list[tuple[int, int]] = []  # heap of (stamp, page); stale entries are skipped
        self._changes: dict[bytes, BlockChange] = {}  # net since the last drain: at most one per key

    @property
    def free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Findable pages that nobody holds."""
        return self._cached

    @property
    def used(self) -> int:
        return self.total - len(self._free) - self._cached

    def peek(self, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` are here. Retains nothing and does not count as a use."""
        n = 0
        while n < len(keys) and keys[n] in self._by_key:
            n += 1
        return usable(n, self.quantum)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the leading ``keys`` that are here, each retained for the caller, who releases them."""
        pages = [self._by_key[key].page for key in keys[: self.peek(keys)]]
        for page in pages:
            self._hold(page)
        return pages

    def allocate(self, n: int) -> list[int]:
        """``n`` pages, each held once by the caller; OutOfPages, and nothing taken, where there are not that many."""
        if n > len(self._free) + self._cached:
            raise OutOfPages(f"{n} pages wanted, {len(self._free)} free and {self._cached} cached of {self.total}")
        self._evict(n - len(self._free))
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def publish(self, page: int, key: bytes, parent: bytes | None) -> bool:
        """Make ``page`` findable as ``key``; False where it is not: another page has the key, or ``parent`` is not findable."""
        if self._refs[page] < 1:
            raise Bug(f"page {page} published as {key.hex()} while nobody holds it")
        held = self._by_page.get(page)
        if held is not None and held.key != key:
            raise Bug(f"page {page} published as {key.hex()} but holds {held.key.hex()}")
        if held is not None:
            return True
        if key in self._by_key or (parent is not None and parent not in self._by_key):
            return False
        entry = _Entry(page, key, parent)
        self._by_key[key] = self._by_page[page] = entry
        if parent is not None:
            self._by_key[parent].children.add(key)
        self._note(key, BlockChange.STORED)
        return True

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each of ``pages``, all of which are held already."""
        for page in pages:
            if self._refs[page] < 1:
                raise Bug(f"page {page} retained while nobody holds it")
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each. The last one gone, a findable page becomes cached and any other is free."""
        dead: list[int] = []
        for page in pages:
            if self._refs[page] < 1:
                raise Bug(f"page {page} released while nobody holds it")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            entry = self._by_page.get(page)
            if entry is None:
                dead.append(page)
                continue
            self._cached += 1
            self._clock += 1
            self._stamp[page] = self._clock
            self._offer(entry)
        self._bury(dead)

    def clear_cached(self) -> int:
        """Forget every cached page; returns how many."""
        n = self._cached
        self._evict(n)
        return n

    def drain_changes(self) -> list[BlockEvent]:
        """What became findable, or stopped being so, since the last call. A key that came and went is not mentioned."""
        events = []
        for change in (BlockChange.REMOVED, BlockChange.STORED):
            keys = tuple(key for key, what in self._changes.items() if what is change)
            if keys:
                events.append(BlockEvent(change, Tier.G1, keys))
        self._changes.clear()
        return events

    def _hold(self, page: int) -> None:
        if not self._refs[page]:
            self._cached -= 1
        self._refs[page] += 1

    def _offer(self, entry: _Entry) -> None:
        """Enter a cached page among those to evict, unless a findable child still needs it."""
        if entry.children or self._refs[entry.page]:
            return
        if len(self._leaves) > 4 * self.total:  # mostly stale: keep the heap bounded
            self._leaves = [(stamp, page) for stamp, page in set(self._leaves) if self._is_leaf(stamp, page)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (self._stamp[entry.page], entry.page))

    def _is_leaf(self, stamp: int, page: int) -> bool:
        entry = self._by_page.get(page)
        return entry is not None and not entry.children and not self._refs[page] and self._stamp[page] == stamp

    def _evict(self, n: int) -> None:
        """Free ``n`` cached pages, or more where descendants had to go with one."""
        dead: list[int] = []
        while len(dead) < n:
            while self._leaves and not self._is_leaf(*self._leaves[0]):
                heapq.heappop(self._leaves)
            if self._leaves:
                page = heapq.heappop(self._leaves)[1]
            else:
                page = min((p for p in self._by_page if not self._refs[p]), key=lambda p: self._stamp[p])
            dead += self._withdraw(self._by_page[page])
        self._bury(dead)

    def _withdraw(self, entry: _Entry) -> list[int]:
        """Take a block and its descendants out of the index; returns those of their pages that nobody holds."""
        if entry.parent is not None:
            parent = self._by_key[entry.parent]
            parent.children.discard(entry.key)
            self._offer(parent)
        dead: list[int] = []
        doomed = [entry]
        while doomed:
            entry = doomed.pop()
            doomed += [self._by_key[child] for child in entry.children]
            del self._by_key[entry.key], self._by_page[entry.page]
            self._note(entry.key, BlockChange.REMOVED)
            if not self._refs[entry.page]:
                self._cached -= 1
                dead.append(entry.page)
        return dead

    def _bury(self, dead: list[int]) -> None:
        if not dead:
            return
        self._free += reversed(dead)
        if self._on_free is not None:
            self._on_free(dead)

    def _note(self, key: bytes, change: BlockChange) -> None:
        before = self._changes.pop(key, None)
        if before is None:
            self._changes[key] = change
