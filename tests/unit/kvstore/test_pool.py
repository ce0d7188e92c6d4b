"""Situations of the pool that are worth a name; the rest is in test_pool_model."""

from __future__ import annotations

import pytest

from moonpool.core.errors import Busy, InvalidRequest
from moonpool.core.events import BlockChange
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import Landing, LandingSlot, PushNotice, SliceNotice
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import LandingAsk, Life, Reach, Reserved
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.pool import Cleared, Pool
from moonpool.kvstore.slots import SlotMap, SlotState

LAYERS, SLOT = 2, 4096
LAYOUT = KVLayout("m", layers=LAYERS, kv_heads=1, head_dim=4, dtype="float32", block_tokens=16)  # slots of 4096 bytes
WRITER = Life(MemberId("prefill-0"), Incarnation(1))
OTHER = Life(MemberId("prefill-1"), Incarnation(1))
USE = Use()
READER, PUBLISHER = 1, 2


def keys(n: int, name: str = "k") -> tuple[bytes, ...]:
    return tuple(f"{name}{i}".encode().ljust(16, b".") for i in range(n))


def pool_of(slots: int) -> Pool:
    pool = Pool(NodeId("n"), Incarnation(1), SlotMap([4096 * slots]), Lru())
    pool.register(LAYOUT)
    return pool


def ask(name: str, blocks: tuple[bytes, ...], writer: Life = WRITER, **rest: object) -> LandingAsk:
    return LandingAsk(RequestId(name), 1, writer, READER, LAYOUT, blocks, **rest)  # type: ignore[arg-type]


def slot_of(pool: Pool, slot: LandingSlot) -> int:
    found = pool.slots.at(slot.slot.region, slot.slot.offset)
    assert found is not None
    return found


def land(pool: Pool, landing: Landing, blocks: set[int] | None = None) -> None:
    for slot in landing.slots:
        if blocks is None or slot.block in blocks:
            for layer in range(LAYERS):
                assert pool.landings.misses(landing.id, slot_of(pool, slot), layer)
                pool.landings.landed(landing.id, slot_of(pool, slot), layer, 1.0)


def store(pool: Pool, blocks: tuple[bytes, ...], now: float = 1.0) -> None:
    made = pool.reserve(PUBLISHER, WRITER, LAYOUT, blocks, None, USE, now)
    assert pool.seal(PUBLISHER, [one.id for one in made], now) == len(blocks)


def test_a_landing_is_granted_whole_or_not_at_all() -> None:
    pool = pool_of(4)
    store(pool, keys(2))
    with pytest.raises(Busy, match="4 slots needed, 2 free and 0 evictable of 4"):
        pool.landings.grant(ask("r", keys(6)), 2.0)
    assert pool.held.pins == 0
    landing = pool.landings.grant(ask("r", keys(4)), 2.0)
    assert [slot.block for slot in landing.slots] == [2, 3]
    assert [slot.block for slot in landing.held] == [0, 1]


def test_the_tail_is_never_findable_and_its_slot_comes_free() -> None:
    pool = pool_of(3)
    landing = pool.landings.grant(ask("r", keys(2), tail_valid=5), 1.0)
    tail = landing.slots[2]
    assert (tail.block, tail.valid) == (2, 5)
    land(pool, landing)
    assert pool.lookup([*keys(2), tail.slot.key]) == 2
    pool.landings.drained(landing.id, WRITER, 2.0)
    pool.landings.end(landing.id, 2.0)
    assert pool.slots.free(SLOT) == 1
    assert pool.slots.counts[SlotState.SEALED] == 2


def test_blocks_that_land_out_of_order_wait_for_their_parents() -> None:
    pool = pool_of(4)
    landing = pool.landings.grant(ask("r", keys(3)), 1.0)
    land(pool, landing, {1, 2})
    assert pool.lookup(keys(3)) == 0
    assert len(pool.held.index) == 0
    land(pool, landing, {0})
    assert pool.lookup(keys(3)) == 3


def test_a_later_start_without_its_parents_name_is_readable_but_not_findable() -> None:
    pool = pool_of(4)
    store(pool, keys(1))
    blind = pool.landings.grant(ask("r1", keys(3)[1:], first_block=1), 1.0)
    land(pool, blind)
    assert pool.lookup(keys(3)) == 1
    pool.landings.drained(blind.id, WRITER, 1.0)
    pool.landings.end(blind.id, 1.0)
    named = pool.landings.grant(ask("r2", keys(3)[1:], first_block=1, parent=keys(1)[0]), 1.0)
    land(pool, named)
    assert pool.lookup(keys(3)) == 3


def test_two_landings_of_one_prompt_both_get_slots_and_the_first_seal_wins() -> None:
    pool = pool_of(4)
    first = pool.landings.grant(ask("r1", keys(2)), 1.0)
    second = pool.landings.grant(ask("r2", keys(2), OTHER), 1.0)
    land(pool, second)
    land(pool, first)
    assert pool.held.counted["seals_lost"] == 2
    assert pool.slots.counts[SlotState.RESERVED] == 2
    pool.landings.end(first.id, 2.0)
    assert pool.slots.counts[SlotState.FENCED] == 2, "the loser's writer has not drained"
    pool.landings.drained(first.id, WRITER, 2.0)
    assert pool.slots.free(SLOT) == 2
    assert pool.lookup(keys(2)) == 2


def test_a_landing_pins_its_sealed_blocks_until_reader_and_writer_are_through() -> None:
    pool = pool_of(2)
    landing = pool.landings.grant(ask("r", keys(2)), 1.0)
    land(pool, landing)
    for step in (lambda: pool.landings.drained(landing.id, WRITER, 2.0), lambda: pool.landings.end(landing.id, 2.0)):
        with pytest.raises(Busy):
            pool.landings.grant(ask("x", keys(1, "x")), 2.0)
        step()
    assert pool.landings.grant(ask("x", keys(1, "x")), 2.0)
    assert pool.lookup(keys(2)) == 1, "the leaf went first"


def test_asking_again_for_the_same_attempt_answers_the_same_landing_and_for_other_blocks_nothing() -> None:
    pool = pool_of(4)
    landing = pool.landings.grant(ask("r", keys(2)), 1.0)
    assert pool.landings.grant(ask("r", keys(2)), 2.0) is landing
    with pytest.raises(InvalidRequest, match="under a new attempt"):
        pool.landings.grant(ask("r", keys(3)), 2.0)


def test_a_late_drain_frees_what_was_fenced_and_a_strangers_does_not() -> None:
    pool = pool_of(2)
    landing = pool.landings.grant(ask("r", keys(2)), 1.0)
    pool.landings.end(landing.id, 2.0)
    assert not pool.landings.drained(landing.id, OTHER, 3.0)
    assert not pool.landings.drained(landing.id, Life(WRITER.member, Incarnation(2)), 3.0)
    assert pool.slots.counts[SlotState.FENCED] == 2
    assert pool.landings.drained(landing.id, WRITER, 3.0)
    assert pool.slots.free(SLOT) == 2


def test_making_the_endpoint_anew_proves_nothing_about_a_writer_that_maps_the_region() -> None:
    pool = pool_of(4)
    mapped = pool.landings.grant(ask("r1", keys(2), reach=Reach.MAPPED), 1.0)
    remote = pool.landings.grant(ask("r2", keys(2, "x"), OTHER), 1.0)
    for landing in (mapped, remote):
        pool.landings.end(landing.id, 2.0)
    assert pool.waiting_for_remake == 2
    assert pool.endpoint_remade(pool.fenced_remote(), 3.0) == 1
    assert pool.slots.counts[SlotState.FENCED] == 2
    pool.writer_gone(WRITER, 4.0)
    assert pool.slots.free(SLOT) == 4


def test_what_was_fenced_while_the_endpoint_was_made_anew_stays_fenced() -> None:
    pool = pool_of(2)
    before = pool.fenced_remote()
    landing = pool.landings.grant(ask("r", keys(2)), 1.0)
    pool.landings.end(landing.id, 2.0)
    assert pool.endpoint_remade(before, 3.0) == 0
    assert pool.slots.counts[SlotState.FENCED] == 2


def test_a_dead_writer_whose_slices_are_all_in_fails_nobody() -> None:
    pool = pool_of(4)
    whole = pool.landings.grant(ask("r1", keys(2)), 1.0)
    torn = pool.landings.grant(ask("r2", keys(2, "x")), 1.0)
    land(pool, whole)
    assert pool.writer_gone(WRITER, 2.0) == [torn]
    assert pool.lookup(keys(2)) == 2
    assert pool.slots.counts[SlotState.RESERVED] == 2, "the reader of the torn one may still copy"
    pool.landings.end(torn.id, 3.0)
    assert pool.slots.free(SLOT) == 2


def test_publishers_hear_what_is_there_on_its_way_full_or_without_parent() -> None:
    pool = pool_of(3)
    store(pool, keys(1))
    landing = pool.landings.grant(ask("r", keys(2)), 1.0)
    answers = pool.reserve(PUBLISHER, OTHER, LAYOUT, keys(4), None, USE, 1.0)
    assert [a.state for a in answers] == [Reserved.SEALED, Reserved.IN_FLIGHT, Reserved.NEW, Reserved.FULL]
    orphan = pool.reserve(PUBLISHER, OTHER, LAYOUT, keys(5, "z")[2:], keys(2, "z")[1], USE, 1.0)
    assert [a.state for a in orphan] == [Reserved.NO_PARENT] * 3
    land(pool, landing)
    assert pool.seal(PUBLISHER, [answers[2].id], 2.0) == 1
    assert pool.lookup(keys(4)) == 3


def test_making_room_never_takes_the_parent_of_what_is_being_published() -> None:
    pool = pool_of(2)
    store(pool, keys(1), now=1.0)
    store(pool, keys(1, "x"), now=5.0)
    (answer,) = pool.reserve(PUBLISHER, WRITER, LAYOUT, keys(2)[1:], keys(1)[0], USE, 6.0)
    assert answer.state is Reserved.NEW
    assert pool.lookup(keys(1, "x")) == 0, "the younger one went, because the older one is needed"
    assert pool.seal(PUBLISHER, [answer.id], 7.0) == 1
    assert pool.lookup(keys(2)) == 2


def test_a_silent_publishers_slots_wait_for_its_word_or_its_death() -> None:
    pool = pool_of(3)
    answers = pool.reserve(PUBLISHER, WRITER, LAYOUT, keys(3), None, USE, 1.0)
    pool.session_ended(PUBLISHER, 2.0)
    assert pool.slots.counts[SlotState.FENCED] == 3
    assert pool.seal(PUBLISHER, [answers[0].id], 3.0) == 0, "a late seal is its word, and nothing more"
    assert pool.slots.counts[SlotState.FENCED] == 2
    (again,) = pool.reserve(9, OTHER, LAYOUT, keys(1), None, USE, 3.0)
    assert again.state is Reserved.NEW, "others may write it meanwhile"
    pool.writer_gone(WRITER, 4.0)
    assert pool.slots.counts[SlotState.FENCED] == 0


def test_a_quarantined_block_takes_its_descendants_along_and_is_freed_after_its_last_pin() -> None:
    pool = pool_of(4)
    store(pool, keys(3))
    ticket = pool.pin(READER, keys(3), USE, 2.0)
    assert pool.quarantine(keys(3)[1], "decode copy") == 2
    assert pool.lookup(keys(3)) == 1
    assert pool.slots.counts[SlotState.SEALED] == 3
    (again,) = pool.reserve(PUBLISHER, WRITER, LAYOUT, keys(2)[1:], keys(1)[0], USE, 2.0)
    assert pool.seal(PUBLISHER, [again.id], 2.0) == 1, "it may be written again at once"
    pool.unpin(READER, ticket.id, 3.0)
    assert pool.slots.counts[SlotState.SEALED] == 2
    assert pool.numbers()["digest_mismatches_decode_copy"] == 1


def store_two_chains(pool: Pool) -> None:
    store(pool, keys(2), now=1.0)
    store(pool, keys(2, "x"), now=2.0)


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    pool = pool_of(4)
    store_two_chains(pool)
    ticket = pool.pin(READER, keys(2), USE, 3.0)
    pool.unpin(READER, ticket.id, 3.0)
    pool.take_events()
    pool.landings.grant(ask("r", keys(3, "n")), 4.0)
    (batch,) = pool.take_events()
    assert [(e.change, e.keys) for e in batch.events] == [(BlockChange.REMOVED, (keys(2, "x")[1], keys(2, "x")[0], keys(2)[1]))]


def test_blocks_that_another_node_took_over_go_first_up_to_the_last_fork() -> None:
    pool = pool_of(8)
    a, b = keys(4, "a"), keys(2, "b")
    store(pool, a, now=1.0)
    store(pool, b, now=2.0)
    (fork,) = pool.reserve(PUBLISHER, WRITER, LAYOUT, keys(1, "c"), a[1], USE, 3.0)
    pool.seal(PUBLISHER, [fork.id], 3.0)
    assert pool.cool(a, 4.0) == 2, "the first two have another continuation, which nobody took over"
    assert pool.cool(keys(1, "unknown"), 4.0) == 0
    assert pool.numbers()["cooled"] == 2
    store(pool, keys(4, "d"), now=5.0)
    assert [pool.lookup(a), pool.lookup(b), pool.lookup([*a[:2], *keys(1, "c")])] == [2, 1, 3]


def test_blocks_before_those_taken_over_go_with_them() -> None:
    pool = pool_of(6)
    store(pool, keys(4, "a"), now=1.0)
    store(pool, keys(2, "b"), now=2.0)
    pool.pin(READER, keys(4, "a"), USE, 3.0)
    pool.session_ended(READER, 3.0)
    assert pool.cool(keys(4, "a")[2:], 4.0) == 4
    store(pool, keys(3, "c"), now=5.0)
    assert [pool.lookup(keys(4, "a")), pool.lookup(keys(2, "b"))] == [1, 2]


def test_a_cooled_block_that_is_used_again_keeps_its_place() -> None:
    pool = pool_of(4)
    store(pool, keys(2, "a"), now=1.0)
    store(pool, keys(2, "b"), now=2.0)
    pool.cool(keys(2, "b"), 3.0)
    pool.pin(READER, keys(2, "b"), USE, 4.0)
    pool.session_ended(READER, 5.0)
    store(pool, keys(2, "c"), now=6.0)
    assert [pool.lookup(keys(2, name)) for name in "abc"] == [0, 2, 2]


def test_clear_drops_everything_that_nobody_holds() -> None:
    pool = pool_of(4)
    store_two_chains(pool)
    pool.pin(READER, keys(1), USE, 3.0)
    assert pool.clear(keys(1)) == Cleared(1, 1, SLOT), "what comes after it goes"
    assert pool.clear(dry_run=True) == pool.clear() == Cleared(2, 1, 2 * SLOT)
    assert pool.lookup(keys(2)) == 1


def test_notices_are_checked_against_their_landing() -> None:
    pool = pool_of(4)
    landing = pool.landings.grant(ask("r", keys(1), tail_valid=3), 1.0)
    whole, tail = (SliceNotice(s.slot.region, s.slot.offset, s.valid, 0) for s in landing.slots)

    def notice(*pieces: SliceNotice, layer: int = 0, request: str = "r", id: int = landing.id) -> PushNotice:
        return PushNotice(id, RequestId(request), 1, 0, layer, pieces)

    assert len(pool.landings.expected(notice(whole, tail))[1]) == 2
    assert pool.landings.expected(notice(whole, request="other")) == (None, [])
    assert pool.landings.expected(notice(whole, id=99)) == (None, [])
    assert pool.held.counted["notices_ignored"] == 2
    for bad in (
        notice(whole, layer=LAYERS),
        notice(SliceNotice(0, 4096 * 3, 16, 0)),
        notice(SliceNotice(tail.region, tail.offset, 4, 0)),
        notice(SliceNotice(7, 0, 16, 0)),
        notice(SliceNotice(0, 12, 16, 0)),
    ):
        with pytest.raises(InvalidRequest):
            pool.landings.expected(bad)


def test_a_rejected_slice_stays_missing_until_it_lands() -> None:
    pool = pool_of(2)
    landing = pool.landings.grant(ask("r", keys(1)), 1.0)
    slot = slot_of(pool, landing.slots[0])
    assert not pool.landings.settled(landing.id)
    pool.landings.rejected(landing.id, slot, 1)
    assert pool.landings.settled(landing.id)
    assert pool.landings.missing(landing.id) == ([(0, 0), (0, 1)], [(0, 1)])
    land(pool, landing)
    assert pool.landings.missing(landing.id) == ([], [])
