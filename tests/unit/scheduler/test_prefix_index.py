from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation
from moonpool.scheduler.prefix_index import Applied, PrefixIndex

HOLDERS = ("a", "b", "c")
TIERS = (Tier.G2, Tier.G3, Tier.G4)
LIFE = Incarnation(7)


def key(path: tuple[int, ...]) -> bytes:
    """Keys name their whole prefix, as block keys do."""
    return bytes((*path, 255)).ljust(16, b"\0")


def chain(path: tuple[int, ...]) -> list[bytes]:
    return [key(path[: i + 1]) for i in range(len(path))]


def stored(*keys: bytes, tier: Tier = Tier.G2) -> BlockEvent:
    return BlockEvent(BlockChange.STORED, tier, keys)


def removed(*keys: bytes, tier: Tier = Tier.G2) -> BlockEvent:
    return BlockEvent(BlockChange.REMOVED, tier, keys)


def batch(holder: str, number: int, *events: BlockEvent, life: int = LIFE) -> EventBatch:
    return EventBatch(holder, Incarnation(life), number, events)


@dataclass
class Dumb:
    """One set of paths per (holder, tier), prefix-closed over the tiers of a holder."""

    has: dict[str, dict[Tier, set[tuple[int, ...]]]] = field(
        default_factory=lambda: {h: {t: set() for t in TIERS} for h in HOLDERS}
    )

    def any_tier(self, holder: str) -> set[tuple[int, ...]]:
        return set().union(*self.has[holder].values())

    def store(self, holder: str, tier: Tier, path: tuple[int, ...]) -> bool:
        if path[:-1] and path[:-1] not in self.any_tier(holder):
            return False
        self.has[holder][tier].add(path)
        return True

    def remove(self, holder: str, tier: Tier, path: tuple[int, ...]) -> bool:
        elsewhere = any(path in self.has[holder][t] for t in TIERS if t is not tier)
        if not elsewhere and any(len(p) > len(path) and p[: len(path)] == path for p in self.any_tier(holder)):
            return False
        self.has[holder][tier].discard(path)
        return True

    def depth(self, holder: str, path: tuple[int, ...]) -> int:
        held = self.any_tier(holder)
        return next((i for i in range(len(path)) if path[: i + 1] not in held), len(path))

    def tier(self, holder: str, path: tuple[int, ...]) -> Tier | None:
        return next((t for t in TIERS if path in self.has[holder][t]), None)


paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "remove", "remove", "drop", "snapshot", "pieces", "load", "sweep")),
        st.sampled_from(HOLDERS),
        st.sampled_from(TIERS),
        paths,
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.lists(paths, min_size=1, max_size=5))
def test_match_and_tiers_agree_with_sets_whatever_happened(
    ops: list[tuple[str, str, Tier, tuple[int, ...]]], asked: list[tuple[int, ...]]
) -> None:
    index, dumb = PrefixIndex(Tier.G2), Dumb()
    number = dict.fromkeys(HOLDERS, 1)
    life = dict.fromkeys(HOLDERS, 1)
    for op, holder, tier, path in ops:
        if op == "sweep":
            index.sweep(3)
        elif op == "load":
            index.load_more(2)
        elif op == "drop":
            index.drop(holder)
            dumb.has[holder] = {t: set() for t in TIERS}
            number[holder], life[holder] = 1, life[holder] + 1
        elif op in ("snapshot", "pieces"):
            number[holder] += 10
            entries = tuple((t, tuple(map(key, sorted(dumb.has[holder][t])))) for t in TIERS)
            snapshot = IndexSnapshot(holder, Incarnation(life[holder]), number[holder] - 1, entries)
            index.load(snapshot, 1 if op == "pieces" else None)
        elif op == "store":
            done = [path[: i + 1] for i in range(len(path)) if dumb.store(holder, tier, path[: i + 1])]
            event = BlockEvent(BlockChange.STORED, tier, tuple(map(key, done)))
            assert index.apply(batch(holder, number[holder], event, life=life[holder])) is Applied.DONE
            number[holder] += 1
        elif dumb.remove(holder, tier, path):
            event = BlockEvent(BlockChange.REMOVED, tier, (key(path),))
            assert index.apply(batch(holder, number[holder], event, life=life[holder])) is Applied.DONE
            number[holder] += 1
    while index.load_more(3):
        pass
    for path in asked:
        runs = index.match(chain(path))
        found = {name: depth for depth, mask in runs for name in index.names(mask)}
        assert found == {h: d for h in HOLDERS if (d := dumb.depth(h, path))}
        assert [depth for depth, _ in runs] == sorted({depth for depth, _ in runs})
        assert [index.tier_of(key(path), h) for h in HOLDERS] == [dumb.tier(h, path) for h in HOLDERS]


@given(steps)
@settings(max_examples=50, deadline=None)
def test_nothing_is_left_once_every_holder_is_dropped_and_swept(ops: list[tuple[str, str, Tier, tuple[int, ...]]]) -> None:
    index = PrefixIndex(Tier.G2)
    number = dict.fromkeys(HOLDERS, 1)
    for op, holder, tier, path in ops:
        change = BlockChange.REMOVED if op == "remove" else BlockChange.STORED
        index.apply(batch(holder, number[holder], BlockEvent(change, tier, tuple(chain(path)))))
        number[holder] += 1
    for holder in HOLDERS:
        index.drop(holder)
    index.sweep(10_000)
    assert len(index) == index.holder_sets == 0
    assert index.match(chain((0, 0))) == []


def test_a_big_snapshot_comes_in_by_parts_and_events_after_it_wait_for_them() -> None:
    index = PrefixIndex(Tier.G2)
    blocks = chain((0,) * 5)
    assert index.load(IndexSnapshot("a", LIFE, 4, ((Tier.G2, tuple(blocks[:4])), (Tier.G3, (blocks[3],)))), 2) is Applied.DONE
    assert index.match(blocks) == [(2, 1)]
    assert index.next_number("a", LIFE) == 5
    assert index.apply(batch("a", 5, removed(blocks[3], tier=Tier.G3), stored(blocks[4]))) is Applied.DONE
    assert index.apply(batch("a", 6, removed(blocks[4]), removed(blocks[3]))) is Applied.DONE
    assert index.next_number("a", LIFE) == 8
    assert index.load_more(1)
    assert index.match(blocks) == [(3, 1)]
    assert not index.load_more(10)
    assert index.match(blocks) == [(3, 1)], "what was removed since does not come back"
    assert index.apply(batch("a", 9)) is Applied.GAP


def test_a_holder_that_is_dropped_or_asked_anew_while_it_is_loaded_forgets_the_rest() -> None:
    index = PrefixIndex(Tier.G2)
    old, new = chain((0, 0, 0)), chain((1,))
    index.load(IndexSnapshot("a", LIFE, 1, ((Tier.G2, tuple(old)),)), 1)
    index.load(IndexSnapshot("a", LIFE, 9, ((Tier.G2, tuple(new)),)), 0)
    assert not index.load_more(100)
    assert (index.match(old), len(index.match(new))) == ([], 1)
    index.load(IndexSnapshot("a", LIFE, 10, ((Tier.G2, tuple(old)),)), 1)
    index.drop("a")
    assert not index.load_more(100)
    assert index.match(old) == []


def test_events_do_not_wait_for_a_snapshot_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.scheduler.prefix_index.MOST_BEHIND", 3)
    index = PrefixIndex(Tier.G2)
    known, later = chain((0,) * 6), chain((1,) * 4)
    index.load(IndexSnapshot("a", LIFE, 1, ((Tier.G2, tuple(known)),)), 1)
    index.apply(batch("a", 2, stored(*later[:3])))
    assert index.match(later) == []
    index.apply(batch("a", 3, stored(later[3])))
    assert (index.match(known), index.match(later)) == ([(6, 1)], [(4, 1)])


@pytest.mark.parametrize("holders", [64, 512])
def test_a_block_takes_bounded_memory_however_many_hold_it_in_whatever_tiers(holders: int) -> None:
    """Every chain of 32 has a set of holders of its own; up to half of the nodes hold it, a few on SSD only."""
    index = PrefixIndex(Tier.G2)
    chains = [tuple((n * 32 + i).to_bytes(16, "little") for i in range(32)) for n in range(340)]
    for h in range(holders):
        mine = [stored(*c) for n, c in enumerate(chains) if h == n % holders or (n * 7 + h * 13) % 97 < n / 4]
        below = [stored(*c, tier=Tier.G3) for c in chains[h % 9 :: 9]]
        index.apply(batch(f"n{h}", 1, *mine, *below))
    assert len(index) == 10_880
    assert index.holder_sets >= 100
    assert index.memory_bytes() / len(index) <= 120


def test_sets_of_holders_that_no_block_has_any_more_are_forgotten() -> None:
    index = PrefixIndex(Tier.G2)
    blocks = chain((0,) * 8)
    for turn in range(50):
        for at, holder in enumerate(HOLDERS):
            index.apply(batch(holder, 2 * turn + 1, stored(*blocks[: (turn + at) % 8 + 1])))
        for holder in HOLDERS:
            index.apply(batch(holder, 2 * turn + 2, removed(*blocks)))
    assert (len(index), index.holder_sets) == (0, 0)


def test_bits_of_dropped_holders_are_used_again_only_after_the_sweep() -> None:
    index = PrefixIndex(Tier.G2)
    index.apply(batch("a", 1, stored(*chain((0, 0, 0)))))
    index.drop("a")
    index.apply(batch("b", 1, stored(key((1,)))))
    assert index.match(chain((0, 0, 0))) == []
    assert index.bits == 2
    index.sweep(2)
    index.apply(batch("c", 1))
    assert index.bits == 3
    index.sweep(100)
    index.apply(batch("d", 1, stored(*chain((0, 0)))))
    assert index.bits == 3
    assert [(d, list(index.names(m))) for d, m in index.match(chain((0, 0, 0)))] == [(2, ["d"])]
    assert index.holders() == ["b", "c", "d"]


def test_a_missing_number_stops_the_holder_until_its_snapshot() -> None:
    index = PrefixIndex(Tier.G2)
    one, two, three = chain((0, 1, 0))
    assert index.apply(batch("a", 1, stored(one))) is Applied.DONE
    assert index.apply(batch("a", 3, stored(two))) is Applied.GAP
    assert index.next_number("a", LIFE) == 0
    assert index.apply(batch("a", 2, stored(two))) is Applied.GAP, "order within the gap cannot be told any more"
    assert index.match([one, two]) == [(1, 1)], "what was known stays useful"
    assert index.load(IndexSnapshot("a", LIFE, 9, ((Tier.G2, (one, two)),))) is Applied.DONE
    assert index.next_number("a", LIFE) == 10
    assert index.apply(batch("a", 10, stored(three))) is Applied.DONE
    ((depth, mask),) = index.match([one, two, three])
    assert (depth, list(index.names(mask))) == (3, ["a"])


def test_repeated_and_overlapping_batches_change_nothing() -> None:
    index = PrefixIndex(Tier.G2)
    one, two = chain((0, 0))
    index.apply(batch("a", 1, stored(one), stored(two)))
    index.apply(batch("a", 3, removed(two)))
    assert index.apply(batch("a", 1, stored(one), stored(two))) is Applied.DONE
    assert index.apply(batch("a", 2, stored(two), removed(two), stored(two))) is Applied.DONE
    assert index.match([one, two]) == [(2, 1)]
    assert index.next_number("a", LIFE) == 5


def test_a_new_life_forgets_the_old_one_and_old_messages_are_ignored() -> None:
    index = PrefixIndex(Tier.G2)
    index.apply(batch("a", 1, stored(key((0,))), life=5))
    assert index.apply(batch("a", 1, stored(key((1,))), life=6)) is Applied.DONE
    assert index.match([key((0,))]) == []
    assert index.apply(batch("a", 2, stored(key((0,))), life=5)) is Applied.OLD
    assert index.load(IndexSnapshot("a", Incarnation(5), 4, ())) is Applied.OLD
    assert index.next_number("a", Incarnation(5)) == 0
    assert index.next_number("a", Incarnation(6)) == 2


@pytest.mark.parametrize("number", [2, 1_000])
def test_the_middle_of_an_unknown_life_asks_for_a_snapshot_or_is_followed_from_there(number: int) -> None:
    index = PrefixIndex(Tier.G1)
    late = batch("w", number, stored(key((0,)), tier=Tier.G1))
    assert index.apply(late) is Applied.GAP
    index.follow_from(late)
    assert index.match([key((0,))]) == [(1, 1)]
    assert index.next_number("w", LIFE) == number + 1


def test_removals_and_children_of_unknown_blocks_do_no_harm() -> None:
    index = PrefixIndex(Tier.G2)
    assert (
        index.apply(batch("a", 1, removed(key((0,))), stored(*chain((0, 0))[1:]), removed(key((3,)), tier=Tier.G3)))
        is Applied.DONE
    )
    assert index.match(chain((0, 0))) == []
    assert index.match([]) == []
