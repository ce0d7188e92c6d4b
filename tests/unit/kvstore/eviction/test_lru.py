from __future__ import annotations

from hypothesis import given, settings
from support.eviction import ACTIONS, Action, Machine

from moonpool.core.use import Use
from moonpool.kvstore.eviction.lru import Lru

USE = Use()


@given(ACTIONS)
@settings(max_examples=150, deadline=None)
def test_any_life_of_blocks_is_evicted_by_last_use(actions: list[Action]) -> None:
    machine = Machine(Lru(), rank=lambda block: (block.call,))
    for action in actions:
        machine.step(action)
    machine.empty()


def test_a_parent_that_becomes_a_leaf_late_keeps_its_recent_use() -> None:
    policy = Lru()
    policy.stored([0, 1], 0, USE, 0.0)
    policy.stored([2], 0, USE, 1.0)
    policy.offer([1, 2])
    policy.used([0], 0, USE, 2.0)
    assert policy.choose(1, 3.0) == [1]
    policy.removed([1])
    policy.offer([0])
    assert policy.choose(9, 3.0) == [2, 0]


def test_a_row_given_out_anew_starts_as_the_newest() -> None:
    policy = Lru()
    policy.stored([0], 0, USE, 0.0)
    policy.stored([1], 0, USE, 1.0)
    policy.offer([0, 1])
    policy.removed([0])
    policy.stored([0], 0, USE, 2.0)
    assert policy.choose(9, 3.0) == [1]
    policy.offer([0])
    assert policy.choose(9, 3.0) == [0]
