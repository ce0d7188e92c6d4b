"""The page pool against a reference that recomputes everything from scratch."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from moonpool.core.errors import Bug
from moonpool.core.events import BlockChange, Tier
from moonpool.engine.pages import OutOfPages, PagePool

PAGES = 6
# Keys form a small tree: the key of a path of bytes is the path itself, padded.
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def chain(path: list[int]) -> list[bytes]:
    return [bytes(path[: i + 1]).ljust(16, b"\xff") for i in range(len(path))]


class DumbPool:
    """Every question is answered by looking at all pages."""

    def __init__(self) -> None:
        self.refs = dict.fromkeys(range(PAGES), 0)
        self.named: dict[int, tuple[bytes, bytes | None]] = {}
        self.released: list[int] = []  # pages in the order of their last release

    def page_of(self, key: bytes) -> int | None:
        return next((p for p, (k, _) in self.named.items() if k == key), None)

    def cached(self) -> list[int]:
        return [p for p in self.released if p in self.named and not self.refs[p]]

    def free(self) -> int:
        return sum(1 for p in range(PAGES) if not self.refs[p] and p not in self.named)

    def children(self, page: int) -> list[int]:
        return [p for p, (_, parent) in self.named.items() if parent == self.named[page][0]]

    def withdraw(self, page: int) -> None:
        for child in self.children(page):
            self.withdraw(child)
        del self.named[page]

    def evict(self) -> None:
        leaves = [p for p in self.cached() if not self.children(p)]
        self.withdraw((leaves or self.cached())[0])

    def release(self, page: int) -> None:
        self.refs[page] -= 1
        if not self.refs[page]:
            self.released = [p for p in self.released if p != page] + [page]


class PoolAgainstDumbPool(RuleBasedStateMachine):
    held = Bundle("held")  # lists of pages, each of whose members is held once more

    def __init__(self) -> None:
        super().__init__()
        self.dead: list[int] = []
        self.pool = PagePool(PAGES, self.dead.extend)
        self.dumb = DumbPool()
        self.announced: set[bytes] = set()

    @rule(target=held, path=PATHS)
    def compute(self, path: list[int]) -> list[int]:
        """As a sequence does: take what is cached, compute the rest, make it findable."""
        pages = self._match(chain(path))
        fresh = self._allocate(len(path) - len(pages))
        if fresh is not None:
            self._publish(pages + fresh, chain(path))
        return pages + (fresh or [])

    @rule(target=held, path=PATHS)
    def compute_without_looking(self, path: list[int]) -> list[int]:
        """Two sequences that compute the same blocks at the same time: one of them keeps private copies."""
        fresh = self._allocate(len(path))
        if fresh is not None:
            self._publish(fresh, chain(path))
        return fresh or []

    @rule(target=held, path=PATHS)
    def match(self, path: list[int]) -> list[int]:
        return self._match(chain(path))

    @rule(target=held, n=st.integers(0, 3))
    def allocate(self, n: int) -> list[int]:
        return self._allocate(n) or []

    @rule(pages=held, path=PATHS)
    def publish(self, pages: list[int], path: list[int]) -> None:
        self._publish(pages, chain(path))

    def _allocate(self, n: int) -> list[int] | None:
        self.dead.clear()
        before = set(self.dumb.named)
        if n > self.dumb.free() + len(self.dumb.cached()):
            with pytest.raises(OutOfPages):
                self.pool.allocate(n)
            return None
        while self.dumb.free() < n:
            self.dumb.evict()
        pages = self.pool.allocate(n)
        assert sorted(self.dead) == sorted(p for p in before - set(self.dumb.named) if not self.dumb.refs[p])
        assert len(set(pages)) == n
        for page in pages:
            assert not self.dumb.refs[page]
            assert page not in self.dumb.named
            self.dumb.refs[page] = 1
        return pages

    def _match(self, keys: list[bytes]) -> list[int]:
        want: list[int] = []
        for key in keys:
            page = self.dumb.page_of(key)
            if page is None:
                break
            want.append(page)
        assert self.pool.peek(keys) == len(want)
        assert self.pool.match(keys) == want
        for page in want:
            self.dumb.refs[page] += 1
        return want

    def _publish(self, pages: list[int], keys: list[bytes]) -> None:
        for i, (page, key) in enumerate(zip(pages, keys, strict=False)):
            parent = keys[i - 1] if i else None
            if page in self.dumb.named and self.dumb.named[page][0] != key:
                with pytest.raises(Bug):
                    self.pool.publish(page, key, parent)
                return
            new = self.dumb.page_of(key) is None and (parent is None or self.dumb.page_of(parent) is not None)
            assert self.pool.publish(page, key, parent) == (new or self.dumb.page_of(key) == page)
            if new:
                self.dumb.named[page] = (key, parent)

    @rule(target=held, pages=held)
    def retain(self, pages: list[int]) -> list[int]:
        self.pool.retain(pages)
        for page in pages:
            self.dumb.refs[page] += 1
        return list(pages)

    @rule(pages=consumes(held), backwards=st.booleans())
    def release(self, pages: list[int], backwards: bool) -> None:
        if backwards:
            pages = pages[::-1]
        self.dead.clear()
        for page in pages:
            self.dumb.release(page)
        self.pool.release(pages)
        assert sorted(self.dead) == sorted({p for p in pages if not self.dumb.refs[p] and p not in self.dumb.named})

    @rule()
    def clear_cached(self) -> None:
        assert self.pool.clear_cached() == len(self.dumb.cached())
        for page in self.dumb.cached():
            if page in self.dumb.named:
                self.dumb.withdraw(page)

    @rule()
    def drain_changes(self) -> None:
        for event in self.pool.drain_changes():
            assert event.tier is Tier.G1
            assert event.keys
            if event.change is BlockChange.STORED:
                assert not self.announced & set(event.keys)
                self.announced |= set(event.keys)
            else:
                assert self.announced >= set(event.keys)
                self.announced -= set(event.keys)
        assert self.announced == {key for key, _ in self.dumb.named.values()}

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.free == self.dumb.free()
        assert self.pool.cached == len(self.dumb.cached())
        assert self.pool.free + self.pool.cached + self.pool.used == self.pool.total == PAGES


TestPoolAgainstDumbPool = PoolAgainstDumbPool.TestCase
TestPoolAgainstDumbPool.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_a_page_nobody_holds_cannot_be_released_retained_or_published() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    for wrong in (pool.release, pool.retain):
        with pytest.raises(Bug):
            wrong([page])
    with pytest.raises(Bug):
        pool.publish(page, bytes(16), None)


def test_the_older_page_of_a_key_stays_the_findable_one() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    key = b"k" * 16
    assert pool.publish(first, key, None)
    assert not pool.publish(second, key, None)
    assert pool.match([key]) == [first]


def test_pages_evicted_under_a_long_run_come_back_without_the_heap_growing() -> None:
    pool = PagePool(4)
    for i in range(5_000):
        pages = pool.match(chain([0])) or pool.allocate(1)
        pool.publish(pages[0], chain([0])[0], None)
        pool.release(pages)
        if i % 7 == 0:
            pool.clear_cached()
    assert len(pool._leaves) <= 4 * pool.total + 1
