"""Every policy against a list that does the same by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eviction import ACTIONS, COOLING_ACTIONS, Action, Block, Machine

from moonpool.core.use import Use
from moonpool.kvstore.eviction.length_aware import LengthAware
from moonpool.kvstore.eviction.lfu import Lfu
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.eviction.make import make_policy
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.eviction.ranking import Ranking

USE = Use()


def by_uses(block: Block) -> tuple[int, ...]:
    return block.uses, block.call


def by_uses_then_late(block: Block) -> tuple[int, ...]:
    return block.uses, -block.at, block.call


@pytest.mark.parametrize(("policy", "rank"), [(Lfu, by_uses), (LengthAware, by_uses_then_late)])
@given(actions=ACTIONS)
@settings(max_examples=100, deadline=None)
def test_any_life_of_blocks_is_evicted_by_number_of_uses(policy: type, rank: object, actions: list[Action]) -> None:
    machine = Machine(policy(), rank=rank)  # type: ignore[arg-type]
    for action in actions:
        machine.step(action)
    machine.empty()


def by_last_use(block: Block) -> tuple[int, ...]:
    return (block.call,)


@pytest.mark.parametrize(("policy", "rank"), [(Lru, by_last_use), (Lfu, by_uses), (LengthAware, by_uses_then_late)])
@given(actions=COOLING_ACTIONS)
@settings(max_examples=100, deadline=None)
def test_cooled_blocks_go_before_all_others_until_they_are_used(policy: type, rank: object, actions: list[Action]) -> None:
    machine = Machine(policy(), rank=rank)  # type: ignore[arg-type]
    for action in actions:
        machine.step(action)
    machine.empty()


def test_a_block_cooled_and_used_many_times_takes_a_bounded_place_in_the_queue() -> None:
    policy = Lru()
    policy.stored([0, 1], 0, USE, 0.0)
    policy.offer([0, 1])
    for _ in range(5_000):
        policy.cool([0], 1.0)
        policy.used([0], 0, USE, 1.0)
    assert len(policy._heap) < 4_000
    assert policy.choose(5, 2.0) == [1, 0]


@given(actions=COOLING_ACTIONS)
@settings(max_examples=100, deadline=None)
def test_learning_from_returns_goes_on_whatever_is_cooled(actions: list[Action]) -> None:
    machine = Machine(make_policy("hazard"))
    for action in actions:
        machine.step(action)
    machine.empty()


@pytest.mark.parametrize("name", ["s3fifo", "hazard"])
@given(actions=ACTIONS)
@settings(max_examples=100, deadline=None)
def test_only_candidates_are_chosen_and_none_is_lost(name: str, actions: list[Action]) -> None:
    machine = Machine(make_policy(name))
    for action in actions:
        machine.step(action)
    machine.empty()


@pytest.mark.parametrize("name", ["lru", "lfu", "length_aware", "s3fifo", "hazard"])
@given(actions=ACTIONS)
@settings(max_examples=20, deadline=None)
def test_the_same_life_twice_gives_the_same_choices(name: str, actions: list[Action]) -> None:
    left = []
    for _ in range(2):
        machine = Machine(make_policy(name))
        for action in actions:
            machine.step(action)
        left.append([(block.key, block.row) for block in machine.live.values()])
    assert left[0] == left[1]


def test_of_blocks_used_as_often_the_later_one_in_its_prompt_goes_first() -> None:
    policy: EvictionPolicy = LengthAware()
    policy.stored([0], 2, USE, 0.0)
    policy.stored([1], 7, USE, 1.0)
    policy.stored([2], 9, USE, 2.0)
    policy.used([2], 9, USE, 3.0)
    policy.offer([0, 1, 2])
    assert policy.choose(3, 4.0) == [1, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.booleans()), max_size=80))
@settings(max_examples=150, deadline=None)
def test_a_ranking_follows_ranks_that_rise_and_fall(changes: list[tuple[int, int, bool]]) -> None:
    ranking, candidates = Ranking(), set[int]()
    ranking.grow(7)
    for row, rank, offered in changes:
        ranking.withhold([row])
        ranking.rank[row] = rank
        candidates.discard(row)
        if offered:
            ranking.offer([row])
            candidates.add(row)
        expected = min(((ranking.rank[one], one) for one in candidates), default=(0, None))[1]
        assert ranking.peek() == expected
    assert ranking.take(9) == sorted(candidates, key=lambda one: (ranking.rank[one], one))


def test_a_ranking_stays_small_however_often_ranks_fall() -> None:
    ranking = Ranking()
    ranking.grow(4)
    for at in range(20_000, 0, -1):
        ranking.rank[1] = at
        ranking.offer([1])
    assert len(ranking._heap) < 2_000
    assert ranking.take(2) == [1]
