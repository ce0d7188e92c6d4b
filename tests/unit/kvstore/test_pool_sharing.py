"""Situations of a pool that layouts, tenants and tiers share; the rest is in test_pool_tiers_model."""

from __future__ import annotations

import pytest
from support.pool_record import LARGE, SMALL, TOKENS

from moonpool.core.blocks import BlockHasher, namespace
from moonpool.core.errors import Busy, LayoutMismatch
from moonpool.core.events import Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.layout import SLOT_ALIGN, KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import LandingAsk, Life, Reserved
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap
from moonpool.kvstore.ssd.blocks import Recovered

WRITER = Life(MemberId("w"), Incarnation(1))
SESSION = 1


def keys(n: int, name: str = "k") -> list[bytes]:
    return [f"{name}{i}".encode().ljust(16, b".") for i in range(n)]


def pool_of(units: int, *layouts: KVLayout, ssd: bool = False, **limits: object) -> Pool:
    slots = SlotMap([units * SLOT_ALIGN])
    pool = Pool(NodeId("n"), Incarnation(1), slots, Lru(), Lru() if ssd else None, **limits)  # type: ignore[arg-type]
    for layout in layouts or (SMALL,):
        pool.register(layout)
    return pool


def store(
    pool: Pool, blocks: list[bytes], now: float, layout: KVLayout = SMALL, use: Use = Use(), parent: bytes | None = None
) -> int:
    made = pool.reserve(SESSION, WRITER, layout, blocks, parent, use, now)
    return pool.seal(SESSION, [one.id for one in made if one.id], now)


def to_ssd(pool: Pool, first_extent: int, limit: int = 100) -> int:
    """Demote what there is; returns how many blocks that were."""
    going = pool.demotions(limit, 50.0)
    for extent, one in enumerate(going, first_extent):
        assert pool.demoted(one.id, extent, 50.0)
    return len(going)


# Many at once.


def test_of_sixteen_workers_with_the_same_prompt_one_writes_and_the_others_hear_of_it() -> None:
    pool = pool_of(64)
    prompt = keys(8)
    answers = [pool.reserve(worker, WRITER, SMALL, prompt, None, Use(), 1.0) for worker in range(16)]
    assert {one.state for one in answers[0]} == {Reserved.NEW}
    assert {one.state for answer in answers[1:] for one in answer} == {Reserved.IN_FLIGHT}
    assert pool.seal(0, [one.id for one in answers[0]], 2.0) == 8
    assert {one.state for one in pool.reserve(3, WRITER, SMALL, prompt, None, Use(), 3.0)} == {Reserved.SEALED}
    assert pool.slots.used_bytes == 8 * SMALL.slot_bytes


def test_sixteen_landings_of_one_prompt_leave_one_copy() -> None:
    pool = pool_of(128)
    prompt = tuple(keys(8))
    asks = [LandingAsk(RequestId(f"r{i}"), 1, WRITER, None, SMALL, prompt) for i in range(16)]
    granted = [pool.landings.grant(ask, 1.0) for ask in asks]
    for landing in granted:
        for slot in landing.slots:
            number = pool.slots.at(slot.slot.region, slot.slot.offset)
            assert number is not None
            pool.landings.landed(landing.id, number, 0, 2.0)
        pool.landings.drained(landing.id, WRITER, 3.0)
    assert pool.lookup(prompt) == 8
    assert pool.slots.used_bytes == 8 * SMALL.slot_bytes
    assert pool.held.counted["seals_lost"] == 15 * 8


# Between looking and loading.


def test_blocks_that_go_between_lookup_and_pin_are_a_shorter_hit() -> None:
    pool = pool_of(100)
    store(pool, keys(100), 1.0)
    assert pool.lookup(keys(100)) == 100
    assert store(pool, keys(60, "other"), 2.0) == 60
    ticket = pool.pin(SESSION, keys(100), Use(), 3.0)
    assert [ref.key for ref in ticket.slots] == keys(40), "the first blocks were evicted last"


def test_pinned_blocks_outlive_a_request_that_needs_all_the_room() -> None:
    pool = pool_of(100)
    store(pool, keys(100), 1.0)
    ticket = pool.pin(SESSION, keys(100), Use(), 2.0)
    assert {one.state for one in pool.reserve(2, WRITER, SMALL, keys(100, "other"), None, Use(), 3.0)} == {Reserved.FULL}
    with pytest.raises(Busy):
        pool.landings.grant(LandingAsk(RequestId("r"), 1, WRITER, None, SMALL, tuple(keys(100, "other"))), 3.0)
    assert pool.lookup(keys(100)) == 100
    assert pool.unpin(SESSION, ticket.id, 4.0)
    assert not pool.unpin(SESSION, ticket.id, 4.0)
    assert pool.numbers()["unpins_ignored"] == 1


@pytest.mark.parametrize(("tokens", "whole"), [(31, 1), (32, 2), (33, 2)])
def test_only_blocks_whose_last_token_is_computed_are_found_by_the_next_turn(tokens: int, whole: int) -> None:
    hasher = BlockHasher(bytes(32), namespace(SMALL), TOKENS)
    said = list(range(tokens))
    pool = pool_of(8)
    store(pool, hasher.keys(said), 1.0)
    assert pool.lookup(hasher.keys([*said, *range(100, 140)])) == whole


def test_what_two_prompts_share_counts_in_whole_blocks_only() -> None:
    layout = KVLayout("m", layers=1, kv_heads=1, head_dim=4, dtype="float32", block_tokens=64)
    hasher = BlockHasher(bytes(32), namespace(layout), 64)
    pool = pool_of(8, layout)
    store(pool, hasher.keys(list(range(128))), 1.0, layout)
    other = hasher.keys([*range(48), *range(500, 580)])
    assert pool.lookup(other) == 0
    assert pool.pin(SESSION, other, Use(), 2.0).slots == ()


# Layouts.


def test_a_layout_of_the_same_model_in_another_shape_is_refused_and_other_models_are_not() -> None:
    pool = pool_of(64, SMALL)
    pool.register(SMALL)
    pool.register(LARGE)
    other = KVLayout("small", layers=2, kv_heads=4, head_dim=4, dtype="float32", block_tokens=TOKENS)
    with pytest.raises(LayoutMismatch, match="layers 1 here, 2 at worker-7"):
        pool.register(other, "worker-7")
    huge = KVLayout("huge", layers=64, kv_heads=64, head_dim=64, dtype="float32", block_tokens=TOKENS)
    with pytest.raises(LayoutMismatch, match=r"raise store\.region_bytes"):
        pool.register(huge)
    with pytest.raises(LayoutMismatch, match=SMALL.fingerprint):
        pool.layout(other.fingerprint)
    with pytest.raises(LayoutMismatch):
        pool.reserve(SESSION, WRITER, other, keys(1), None, Use(), 1.0)
    with pytest.raises(LayoutMismatch):
        pool.landings.grant(LandingAsk(RequestId("r"), 1, WRITER, None, other, tuple(keys(1))), 1.0)


def test_blocks_asked_for_under_another_layout_are_a_miss_or_refused() -> None:
    pool = pool_of(64, SMALL, LARGE)
    store(pool, keys(2), 1.0)
    assert pool.pin(SESSION, keys(2), Use(), 2.0, LARGE.fingerprint).slots == ()
    assert len(pool.pin(SESSION, keys(2), Use(), 2.0, SMALL.fingerprint).slots) == 2
    with pytest.raises(LayoutMismatch):
        pool.landings.grant(LandingAsk(RequestId("r"), 1, WRITER, None, LARGE, tuple(keys(2))), 3.0)
    assert pool.slots.used_bytes == 2 * SMALL.slot_bytes


def filled(pool: Pool, layout: KVLayout) -> float:
    return pool.held.index.in_dram[layout.slot_bytes] * layout.slot_bytes / pool.slots.total_bytes


def test_a_mix_that_shifts_from_one_layout_to_the_other_and_back_strands_no_memory() -> None:
    pool = pool_of(2_000, SMALL, LARGE)
    now = 0.0
    for turn, (layout, other) in enumerate([(SMALL, LARGE), (LARGE, SMALL), (SMALL, LARGE)]):
        for burst in range(400):
            now += 1.0
            assert store(pool, keys(1 + burst % 13, f"{turn}.{burst}."), now, layout) == 1 + burst % 13
        assert filled(pool, layout) > 0.97
        assert filled(pool, other) == 0.0
    for burst in range(800):
        now += 1.0
        layout = LARGE if burst % 6 == 0 else SMALL
        assert store(pool, keys(1 + burst % 13, f"m{burst}."), now, layout) == 1 + burst % 13
    assert filled(pool, SMALL) + filled(pool, LARGE) > 0.97


def test_what_somebody_reads_stays_where_it_is_while_everything_around_it_changes_its_size() -> None:
    pool = pool_of(1_000, SMALL, LARGE)
    for i in range(1_000):
        store(pool, keys(1, f"s{i}."), 1.0)
    read = [keys(1, f"s{i}.") for i in range(0, 1_000, 97)]
    tickets = [pool.pin(SESSION, one, Use(), 2.0) for one in read]
    now = 2.0
    for burst in range(100):
        now += 1.0
        store(pool, keys(5, f"b{burst}."), now, LARGE)
    assert filled(pool, LARGE) > 0.5, "spans that hold none of them"
    assert [pool.pin(SESSION, one, Use(), now).slots for one in read] == [ticket.slots for ticket in tickets]


def test_a_block_that_was_to_go_and_is_used_and_to_go_again_goes_once() -> None:
    pool = pool_of(120, SMALL, LARGE)
    store(pool, keys(40, "s"), 1.0)
    store(pool, keys(16, "l"), 2.0, LARGE)
    assert store(pool, keys(1, "m"), 3.0, LARGE) == 1, "the other size comes first in order, and waits"
    for at, used in enumerate((keys(40, "s"), keys(15, "l"), keys(1, "m"))):
        pool.unpin(SESSION, pool.pin(SESSION, used, Use(), 4.0 + at).id, 5.0 + at)
    assert store(pool, keys(1, "n"), 8.0, LARGE) == 1, "again"
    assert store(pool, keys(45, "t"), 9.0) == 45
    assert pool.lookup(keys(40, "s")) == 0


# Tenants.


def test_a_tenant_over_its_quota_gives_up_its_own_blocks_and_nobody_elses() -> None:
    pool = pool_of(64, quotas={"t": 4 * SMALL.slot_bytes})
    store(pool, keys(8, "old"), 1.0)
    mine = Use("t")
    assert store(pool, keys(4, "a"), 2.0, use=mine) == 4
    assert store(pool, keys(3, "b"), 3.0, use=mine) == 3
    assert pool.lookup(keys(8, "old")) == 8
    assert pool.lookup(keys(4, "a")) == 1, "its own oldest leaves went"
    assert pool.quotas()["t"] == (4 * SMALL.slot_bytes, 4 * SMALL.slot_bytes)
    pool.pin(SESSION, keys(3, "b"), mine, 4.0)
    pool.pin(SESSION, keys(1, "a"), mine, 4.0)
    (full,) = pool.reserve(SESSION, WRITER, SMALL, keys(1, "c"), None, mine, 5.0)
    assert full.state is Reserved.FULL
    with pytest.raises(Busy, match=f"tenant t has {4 * SMALL.slot_bytes} bytes of its quota of {4 * SMALL.slot_bytes}"):
        pool.landings.grant(LandingAsk(RequestId("r"), 1, WRITER, None, SMALL, tuple(keys(1, "c")), use=mine), 5.0)
    assert store(pool, keys(20, "d"), 6.0) == 20, "the default tenant has no quota"


def test_the_first_writer_owns_a_block_and_clearing_a_tenant_takes_its_blocks_only() -> None:
    pool = pool_of(64)
    store(pool, keys(2, "a"), 1.0, use=Use("t"))
    store(pool, keys(2, "b"), 1.0, use=Use("u"))
    store(pool, keys(4, "a")[2:], 2.0, use=Use("u"), parent=keys(2, "a")[1])
    said = pool.clear(tenant="t", dry_run=True)
    assert (said.cleared, said.kept) == (0, 2), "what the other tenant has after them holds them"
    assert pool.clear(tenant="u").cleared == 4
    assert pool.clear(tenant="t").bytes == 2 * SMALL.slot_bytes
    assert pool.slots.used_bytes == 0


# Holds.


def test_softly_held_blocks_go_last_and_hard_held_ones_never() -> None:
    pool = pool_of(10)
    store(pool, keys(2, "hard"), 1.0)
    store(pool, keys(2, "soft"), 2.0)
    store(pool, keys(6, "free"), 3.0)
    assert pool.hold("t", keys(2, "hard"), True, 4.0) == 2
    assert pool.hold("t", keys(9, "soft"), False, 4.0) == 2, "as many as are here"
    assert store(pool, keys(6, "new"), 5.0) == 6
    assert (pool.lookup(keys(2, "hard")), pool.lookup(keys(2, "soft")), pool.lookup(keys(6, "free"))) == (2, 2, 0)
    assert store(pool, keys(9, "more"), 6.0) == 8
    assert (pool.lookup(keys(2, "hard")), pool.lookup(keys(2, "soft"))) == (2, 0)
    assert pool.clear().kept == 2
    assert pool.unhold("t", None, 7.0) == 4, "two of them on blocks that are gone"
    assert pool.clear().kept == 0


def test_holds_above_their_share_are_refused_with_the_numbers_and_change_nothing() -> None:
    pool = pool_of(10)
    store(pool, keys(10), 1.0)
    with pytest.raises(Busy, match="node n holds 0 bytes hard, and 24576 more are above the 20480 bytes"):
        pool.hold("t", keys(6), True, 2.0)
    assert pool.numbers()["held_hard_bytes"] == 0
    assert pool.hold("t", keys(5), True, 2.0) == 5
    assert pool.hold("u", keys(5), True, 2.0) == 5, "the same blocks cost nothing again"
    with pytest.raises(Busy, match="tenant t holds 0 bytes softly"):
        pool.hold("t", keys(10), False, 3.0)
    assert pool.unhold("t", None, 4.0) == 5
    assert store(pool, keys(10, "x"), 5.0) == 5, "the other tenant still holds them"


# DRAM and SSD.


def test_a_block_on_ssd_leaves_dram_before_one_that_would_be_lost_and_stays_findable() -> None:
    pool = pool_of(8, ssd=True)
    store(pool, keys(3, "cold"), 1.0)
    store(pool, keys(3, "warm"), 2.0)
    assert to_ssd(pool, 100, limit=3) == 3
    pool.pin(SESSION, keys(3, "cold"), Use(), 3.0)  # now the others are the coldest, but nowhere else
    pool.session_ended(SESSION, 3.0)
    assert store(pool, keys(5, "new"), 4.0) == 5
    assert pool.lookup(keys(3, "cold")) == pool.lookup(keys(3, "warm")) == 3
    assert pool.on_ssd(keys(3, "cold")) == list(zip(keys(3, "cold"), (100, 101, 102), strict=True))
    assert pool.on_ssd(keys(3, "warm")) == []
    assert [ref.key for ref in pool.pin(SESSION, keys(3, "cold"), Use(), 5.0).slots] == []


def test_loading_into_a_full_pool_makes_room_and_where_all_is_in_use_loads_nothing() -> None:
    pool = pool_of(8, ssd=True)
    store(pool, keys(8), 1.0)
    assert to_ssd(pool, 0) == 8
    assert store(pool, keys(8, "new"), 2.0) == 8
    held = pool.pin(SESSION, keys(8, "new"), Use(), 3.0)
    assert pool.promote(keys(8), Use(), 4.0) == []
    pool.unpin(SESSION, held.id, 5.0)
    coming = pool.promote(keys(8), Use(), 6.0)
    assert [(one.key, one.extent) for one in coming] == list(zip(keys(8), range(8), strict=True))
    assert pool.promote(keys(8), Use(), 6.0) == [], "they are on their way"
    assert all(pool.promoted(one.id, True, 7.0) for one in coming[:5])
    assert not any(pool.promoted(one.id, False, 7.0) for one in coming[5:])
    assert len(pool.pin(SESSION, keys(8), Use(), 8.0).slots) == 5
    numbers = pool.numbers()
    assert (numbers["promotions_open"], numbers["slots_reserved"], numbers["blocks_on_ssd"]) == (0, 0, 8)


def test_a_block_in_the_middle_goes_with_what_comes_after_it_only_when_both_copies_are_lost() -> None:
    pool = pool_of(8, ssd=True)
    store(pool, keys(4), 1.0)
    assert to_ssd(pool, 0) == 4
    pool.extents_lost([1], 2.0)
    assert pool.lookup(keys(4)) == 4
    assert store(pool, keys(7, "new"), 3.0) == 7
    assert pool.lookup(keys(4)) == 4, "what only DRAM has stayed"
    pool.extents_lost([0, 99], 4.0)
    assert pool.lookup(keys(4)) == 0
    assert sorted(pool.take_dropped_extents()) == [2, 3], "their copies are of no use"


def test_what_lies_on_ssd_is_found_again_after_a_restart_and_the_rest_is_given_back() -> None:
    pool = pool_of(8, SMALL, ssd=True)

    def block(name: str, at: int, extent: int, layout: str = SMALL.fingerprint) -> Recovered:
        chain = keys(at + 1, name)
        return Recovered(chain[at], chain[at - 1] if at else None, layout, extent, Use("t"))

    found = [block("a", 0, 1), block("a", 1, 2), block("b", 1, 3), block("c", 0, 4, "gone"), block("a", 1, 5)]
    assert pool.recovered(found, 1.0) == [3, 4, 5]
    assert pool.lookup(keys(2, "a")) == 2
    assert [(event.tier, event.keys) for batch in pool.take_events() for event in batch.events] == [
        (Tier.G3, tuple(keys(2, "a")))
    ]
    assert pool.clear(tenant="t").cleared == 2
    assert sorted(pool.take_dropped_extents()) == [1, 2]


def test_a_full_ssd_gives_up_the_coldest_leaf_first_and_never_one_that_is_being_read() -> None:
    pool = pool_of(8, ssd=True)
    store(pool, keys(3, "a"), 1.0)
    store(pool, keys(3, "b"), 2.0)
    assert to_ssd(pool, 0) == 6
    assert store(pool, keys(8, "new"), 3.0) == 8
    held = pool.pin(SESSION, keys(7, "new"), Use(), 4.0)
    (coming,) = pool.promote(keys(1, "a"), Use(), 5.0)
    assert coming.extent == 0
    assert pool.evict_extents(9, 6.0) == [2, 1, 5, 4, 3]
    assert pool.promoted(coming.id, True, 7.0)
    pool.unpin(SESSION, held.id, 8.0)
    assert pool.lookup(keys(3, "a")) == 1


def test_memory_whose_blocks_have_only_ssd_copies_after_them_can_still_be_had() -> None:
    pool = pool_of(4, ssd=True)
    store(pool, keys(4), 1.0)
    assert to_ssd(pool, 0) == 4
    pool.extents_lost([0], 2.0)
    assert store(pool, keys(3, "x"), 3.0) == 3, "the three that SSD has, too"
    ticket = pool.pin(SESSION, keys(3, "x"), Use(), 4.0)
    assert store(pool, keys(1, "y"), 5.0) == 1
    assert pool.lookup(keys(4)) == 0
    assert sorted(pool.take_dropped_extents()) == [1, 2, 3]
    pool.unpin(SESSION, ticket.id, 6.0)


def test_making_room_for_a_load_never_takes_what_the_load_needs() -> None:
    pool = pool_of(4, ssd=True)
    store(pool, keys(3), 1.0)
    assert to_ssd(pool, 0) == 3
    assert store(pool, keys(4, "x"), 2.0) == 4
    (first,) = pool.promote(keys(1), Use(), 3.0)
    assert pool.promoted(first.id, True, 3.0)
    pool.extents_lost([0], 4.0)
    pool.pin(SESSION, keys(3, "x"), Use(), 5.0)
    assert pool.promote(keys(3), Use(), 6.0) == [], "its own first block is all that could go"
    assert pool.lookup(keys(3)) == 3
