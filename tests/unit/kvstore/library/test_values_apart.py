"""Blocks that each begin a sequence, reserved in one call, against the same blocks reserved one by one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life, Reservation, Reserved
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap

LAYOUT = KVLayout("aa", 1, 1, 2000, "uint8", block_tokens=1)
SLOTS = 12
SESSION = 1
WRITER = Life(MemberId("client-1"), Incarnation(1))
names = st.integers(0, 20).map(lambda i: i.to_bytes(16, "big"))
steps = st.one_of(
    st.tuples(st.just("reserve"), st.lists(names, min_size=1, max_size=8)),
    st.tuples(st.sampled_from(["seal", "abandon"]), st.lists(st.integers(0, 30), max_size=6)),
    st.tuples(st.just("clear"), st.lists(names, max_size=3)),
    st.tuples(st.sampled_from(["leave", "die"]), st.just([])),
)


class Side:
    """One pool; ``ids`` are its reservations in the order in which they were made."""

    def __init__(self, together: bool) -> None:
        self.together = together
        self.pool = Pool(NodeId("a"), Incarnation(1), SlotMap([SLOTS * LAYOUT.slot_bytes]), Lru())
        self.pool.register(LAYOUT)
        self.ids: list[int] = []

    def do(self, what: str, given: list[object], now: float) -> object:
        pool = self.pool
        match what:
            case "reserve":
                return self.reserve([key for key in given if isinstance(key, bytes)], now)
            case "seal" | "abandon":
                ids = [self.ids[i % len(self.ids)] for i in given if isinstance(i, int)] if self.ids else []
                ids = list(dict.fromkeys(ids))
                return pool.seal(SESSION, ids, now) if what == "seal" else pool.abandon(SESSION, ids, now)
            case "clear":
                return pool.clear([key for key in given if isinstance(key, bytes)])
            case "leave":
                return pool.session_ended(SESSION, now)
            case _:
                return pool.writer_gone(WRITER, now)

    def reserve(self, keys: list[bytes], now: float) -> list[Reserved]:
        if self.together:
            answers = list(self.pool.reservations.reserve_apart(SESSION, WRITER, LAYOUT, keys, Use(), now))
        else:
            # What was here when the call began is answered so, even where the call itself evicts it to make room.
            here = {key for key in keys if self.pool.lookup([key])}
            answers = [one for key in keys for one in self.reserve_one(key, key in here, now)]
        for answer in answers:
            assert (answer.slot is not None) == (answer.id > 0) == (answer.state is Reserved.NEW)
            if answer.slot is not None:
                assert answer.slot.key == answer.key
                self.ids.append(answer.id)
        taken = [(one.slot.region, one.slot.offset) for one in answers if one.slot]
        assert len(set(taken)) == len(taken)
        return [answer.state for answer in answers]

    def reserve_one(self, key: bytes, here: bool, now: float) -> Sequence[Reservation]:
        if here:
            return [Reservation(key, Reserved.SEALED)]
        return self.pool.reserve(SESSION, WRITER, LAYOUT, [key], None, Use(), now)

    def facts(self) -> dict[str, object]:
        numbers = self.pool.numbers()
        del numbers["event_head"]  # neighbouring changes share an event
        return {"here": set(self.pool.held.index.keys())} | {name: value for name, value in numbers.items() if value}


@settings(max_examples=100)
@given(st.lists(steps, max_size=14))
def test_one_call_for_many_does_what_many_calls_do(plan: list[tuple[str, list[object]]]) -> None:
    together, alone = Side(True), Side(False)
    for now, (what, given_) in enumerate(plan):
        assert together.do(what, given_, float(now)) == alone.do(what, given_, float(now))
        assert together.facts() == alone.facts()
    for side in (together, alone):
        side.pool.writer_gone(WRITER, 99.0)
        side.pool.clear()
        assert side.pool.numbers()["slots_free"] == SLOTS


def test_a_block_apart_is_no_childs_parent_and_goes_alone() -> None:
    side = Side(True)
    keys = [i.to_bytes(16, "big") for i in range(3)]
    side.reserve(keys, 0.0)
    assert side.pool.seal(SESSION, side.ids, 0.0) == 3
    assert side.pool.quarantine(keys[0], "test") == 1
    assert [side.pool.lookup([key]) for key in keys] == [0, 1, 1]
