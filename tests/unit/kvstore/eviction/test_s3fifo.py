from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.use import Use
from moonpool.kvstore.eviction.s3fifo import S3Fifo

USE = Use()


@dataclass
class ByHand:
    """S3-FIFO over lists of keys, all of them candidates: the paper's algorithm as it reads."""

    small: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    ghosts: list[int] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)

    def ask(self, key: int, room: int) -> None:
        if key in self.small or key in self.main:
            self.uses[key] = min(self.uses[key] + 1, 3)
            return
        while len(self.small) + len(self.main) >= room:
            self._evict()
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.uses[key] = 0

    def _evict(self) -> None:
        while True:
            if self.small and (10 * len(self.small) > len(self.small) + len(self.main) or not self.main):
                key = self.small.pop(0)
                if self.uses[key] < 2:
                    self.ghosts = [*self.ghosts, key][-len(self.main) - 1 :]
                    return
                self.main.append(key)
                self.uses[key] = 0
            else:
                key = self.main.pop(0)
                if not self.uses[key]:
                    return
                self.uses[key] -= 1
                self.main.append(key)


@given(st.lists(st.integers(0, 14), max_size=150), st.integers(1, 10))
@settings(max_examples=150, deadline=None)
def test_a_cache_of_lone_blocks_holds_what_the_published_algorithm_holds(asked: list[int], room: int) -> None:
    policy, hand = S3Fifo(), ByHand()
    rows: dict[int, int] = {}
    free = list(range(room))
    for key in asked:
        hand.ask(key, room)
        if key in rows:
            policy.used([rows[key]], 0, USE, 0.0)
            continue
        if not free:
            free = policy.choose(1, 0.0)
            rows = {known: row for known, row in rows.items() if row not in free}
            policy.removed(free)
        rows[key] = free.pop()
        policy.named([rows[key]], [key.to_bytes(16, "little")])
        policy.stored([rows[key]], 0, USE, 0.0)
        policy.offer([rows[key]])
        assert rows.keys() == {*hand.small, *hand.main}


def test_a_block_that_returns_after_its_eviction_outlives_one_seen_once() -> None:
    policy = S3Fifo()
    for row in range(3):
        policy.named([row], [bytes([row])])
        policy.stored([row], 0, USE, 0.0)
    policy.offer([0, 1, 2])
    assert policy.choose(1, 0.0) == [0]
    policy.removed([0])
    policy.named([0], [bytes([0])])
    policy.stored([0], 0, USE, 0.0)
    policy.offer([0])
    assert policy.choose(3, 0.0) == [1, 2, 0]


def test_without_keys_nothing_is_remembered_and_everything_can_go() -> None:
    policy = S3Fifo()
    policy.stored([0, 1], 0, USE, 0.0)
    policy.offer([0, 1])
    assert sorted(policy.choose(5, 0.0)) == [0, 1]
