"""Free runs against a plain set, the table of legal transitions, and slot sizes that share regions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moonpool.core.errors import Bug
from moonpool.kvstore.slots import LEGAL, SlotMap, SlotState
from moonpool.kvstore.spans import FreeRuns, cut_of, span_units, spans_in

UNIT = 4096


@given(
    parts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40),
)
def test_free_runs_hand_out_and_take_back_every_number_once(parts: list[int], steps: list[tuple[bool, int]]) -> None:
    runs, free, out, first = FreeRuns(), set[int](), [], 0
    for n in parts:
        runs.put(first, first + n)
        free |= set(range(first, first + n))
        first += n + 1
    everything = set(free)
    for take, n in steps:
        if take and n <= len(free):
            longest = longest_run(free)
            got = [number for start, end in runs.take(n) for number in range(start, end)]
            assert len(set(got)) == n
            assert set(got) <= free
            assert got == sorted(got)
            if 0 < n <= longest:
                assert got == list(range(got[0], got[0] + n)), "one run was long enough"
            free -= set(got)
            out += got
        elif not take and out:
            number = out.pop(n % len(out))
            start, end = runs.put(number, number + 1)
            free.add(number)
            assert set(range(start, end)) <= free
            assert not {start - 1, end} & free
            assert runs.run_of(number) == start
        assert runs.count == len(free)
    for number in out:
        runs.put(number, number + 1)
    assert len(runs) == len(parts)
    assert {n for start, end in runs.take(len(everything)) for n in range(start, end)} == everything


def longest_run(free: set[int]) -> int:
    longest = length = 0
    for number in range(max(free, default=-1) + 1):
        length = length + 1 if number in free else 0
        longest = max(longest, length)
    return longest


@given(length=st.integers(0, 400), target=st.integers(1, 60), size=st.integers(1, 20))
def test_ground_gives_as_many_slots_as_it_says(length: int, target: int, size: int) -> None:
    target, slots, left = max(target, size), 0, length
    while left >= size:
        cut = cut_of(left, target)
        slots, left = slots + cut // size, left - cut
    assert slots == spans_in(length, target, size)


def test_spans_are_cut_so_that_every_size_fits_with_little_waste() -> None:
    assert span_units(100_000, 1_000, [7]) == 1_000, "one size: whole regions"
    length = span_units(100_000, 65_536, [360, 648])
    assert all(length % size / length < 0.01 for size in (360, 648))
    assert span_units(3_000, 1_000, [360, 648]) <= 1_000


def slots_of(regions: list[int], *sizes: int) -> SlotMap:
    slots = SlotMap([UNIT * n for n in regions])
    for size in sizes or (1,):
        slots.register(UNIT * size)
    return slots


@pytest.mark.parametrize("old", SlotState)
@pytest.mark.parametrize("new", SlotState)
def test_only_legal_transitions_are_made(old: SlotState, new: SlotState) -> None:
    slots = slots_of([2])
    slot, _ = slots.take(UNIT, 2)  # the second keeps the span open
    match old:
        case SlotState.FREE:
            slots.release([slot])
        case SlotState.FENCED:
            slots.fence([slot])
        case SlotState.SEALED:
            slots.seal([slot], [7])
    assert slots.state(slot) is old
    if new is SlotState.RESERVED:
        assert (slots.free(UNIT) == 1) == (new in LEGAL[old])
        return

    def step() -> None:
        match new:
            case SlotState.FREE:
                slots.release([slot])
            case SlotState.FENCED:
                slots.fence([slot])
            case SlotState.SEALED:
                slots.seal([slot], [7])

    if new in LEGAL[old]:
        step()
        assert slots.state(slot) is new
        assert slots.owner(slot) == (7 if new is SlotState.SEALED else None)
    else:
        with pytest.raises(Bug, match="no legal transition"):
            step()


def test_places_are_found_again_by_region_and_offset_and_nowhere_else() -> None:
    slots = slots_of([2, 3])
    taken = slots.take(UNIT, 5)
    places = [slots.ref(slot, b"k") for slot in taken]
    assert sorted((p.region, p.offset) for p in places) == [(0, 0), (0, 4096), (1, 0), (1, 4096), (1, 8192)]
    assert [slots.at(p.region, p.offset) for p in places] == taken
    assert [slots.at(*p) for p in [(0, 8192), (0, 1), (2, 0), (-1, 0), (0, -4096)]] == [None] * 5


def test_one_size_can_have_every_whole_slot_of_every_region() -> None:
    slots = slots_of([10, 7, 2], 3)
    assert slots.free(3 * UNIT) == slots.total(3 * UNIT) == slots.fits(3 * UNIT) == 3 + 2
    taken = slots.take(3 * UNIT, 5)
    assert slots.used_bytes == 15 * UNIT
    slots.release(taken)
    assert slots.free(3 * UNIT) == 5
    assert slots.used_bytes == 0


def test_an_empty_span_goes_to_the_size_that_asks_next() -> None:
    slots = slots_of([24], 2, 3)
    small = slots.take(2 * UNIT, slots.free(2 * UNIT))
    assert len(small) == 12
    assert slots.free(3 * UNIT) == 0
    slots.release(small)
    assert slots.free(3 * UNIT) == 8
    large = slots.take(3 * UNIT, 8)
    assert slots.free(2 * UNIT) == 0
    assert {slots.size(slot) for slot in large} == {3 * UNIT}


def test_spans_of_whole_regions_are_parted_when_a_second_size_comes() -> None:
    slots = slots_of([64, 64], 2)
    taken = slots.take(2 * UNIT, 64)
    places = [slots.place(slot) for slot in taken]
    slots.register(3 * UNIT)
    assert [slots.place(slot) for slot in taken] == places
    assert [slots.at(*place) for place in places] == taken
    slots.release(taken[:24])
    assert slots.free(3 * UNIT) >= 8, "a part of the region is enough"
    slots.release(taken[24:])
    assert slots.free(3 * UNIT) == 42
    assert slots.free(2 * UNIT) == 64


class Memory:
    """What lies in each place of the pool, as an owner and a copier see it."""

    def __init__(self, regions: list[int], *sizes: int) -> None:
        self.content: dict[tuple[int, int], int] = {}
        self.freed: list[tuple[int, int]] = []
        self.slots = SlotMap([UNIT * n for n in regions], self._freed, self._moved)
        for size in sizes:
            self.slots.register(UNIT * size)

    def _freed(self, slot: int) -> None:
        self.content.pop(self.slots.place(slot), None)

    def _moved(self, slot: int, to: int) -> None:
        self.content[self.slots.place(to)] = self.content[self.slots.place(slot)]

    def fill(self, size: int, rows: list[int]) -> dict[int, int]:
        taken = self.slots.take(size * UNIT, len(rows))
        self.slots.seal(taken, rows)
        for slot, row in zip(taken, rows, strict=True):
            self.content[self.slots.place(slot)] = row
        return dict(zip(rows, taken, strict=True))


def test_a_span_is_vacated_by_copying_what_it_holds_into_other_slots_of_its_size() -> None:
    memory = Memory([48], 2, 3)
    slots = memory.slots
    at = memory.fill(2, list(range(24)))
    (used, count, span), *_ = slots.movable(2 * UNIT, 3 * UNIT, {5})
    assert used == count == 12
    gone = [row for row in range(24) if row % 2]
    slots.release([at.pop(row) for row in gone])
    assert slots.open_slots(2 * UNIT) == (24, count), "room for all of it, wherever it is"
    owners = [row for row, slot in at.items() if slots._span_of[slot] == span]
    assert 5 not in owners, "somebody reads it"
    moved = dict(slots.vacate(span))
    assert sorted(moved) == sorted(owners)
    at |= moved
    assert {row: memory.content[slots.place(slot)] for row, slot in at.items()} == {row: row for row in at}
    assert [slots.owner(slot) for slot in at.values()] == list(at)
    assert slots.free(3 * UNIT) >= 8


def test_reserved_and_fenced_slots_keep_their_span() -> None:
    slots = slots_of([48], 2, 3)
    taken = slots.take(2 * UNIT, 24)
    slots.seal(taken[1:], range(1, 24))
    slots.release(taken[1:8] + taken[12:20])
    (other,) = list(slots.movable(2 * UNIT, 3 * UNIT, set()))
    assert other[:2] == (4, 12)
    slots.fence(taken[:1])
    assert list(slots.movable(2 * UNIT, 3 * UNIT, set())) == [other]
    slots.release(taken[:1])
    assert len(list(slots.movable(2 * UNIT, 3 * UNIT, set()))) == 2
    assert list(slots.movable(2 * UNIT, 25 * UNIT, set())) == [], "spans too short for the other size"


@given(steps=st.lists(st.tuples(st.sampled_from([2, 3, 5]), st.integers(-6, 6)), max_size=60))
def test_slots_of_all_sizes_never_overlap_and_nothing_is_lost(steps: list[tuple[int, int]]) -> None:
    memory = Memory([64, 37, 11], 2, 3)
    slots, held, rows = memory.slots, dict[int, tuple[int, int]](), 0
    for i, (size, n) in enumerate(steps):
        if i == 20:
            slots.register(5 * UNIT)
        if size == 5 and i < 20:
            continue
        if n > 0 and slots.free(size * UNIT) >= n:
            held |= {row: (slot, size) for row, slot in memory.fill(size, list(range(rows, rows + n))).items()}
            rows += n
        elif n > 0:
            for other in {2, 3, 5} - {size} - ({5} if i < 20 else set()):
                for _, count, span in list(slots.movable(other * UNIT, size * UNIT, set()))[:1]:
                    if count <= slots.open_slots(other * UNIT)[1]:
                        for row, slot in slots.vacate(span):
                            held[row] = slot, held[row][1]
        elif n < 0:
            gone = list(held)[: -n * 2 : 2]
            slots.release([held.pop(row)[0] for row in gone])
        units: set[tuple[int, int]] = set()
        for row, (slot, of) in held.items():
            region, offset = slots.place(slot)
            mine = {(region, offset // UNIT + k) for k in range(of)}
            assert not units & mine
            assert offset // UNIT + of <= (64, 37, 11)[region]
            units |= mine
            assert memory.content[region, offset] == row
            assert slots.owner(slot) == row
            assert slots.at(region, offset) == slot
            assert slots.size(slot) == of * UNIT
        assert slots.used_bytes == len(units) * UNIT
    slots.release([slot for slot, _ in held.values()])
    assert len(slots._ground) == 3
    assert slots.free_bytes == slots.total_bytes


def test_ground_that_a_long_span_never_used_is_there_for_a_size_that_comes_later() -> None:
    slots = slots_of([192], 3)
    slots.seal(slots.take(3 * UNIT, 6), range(6))
    slots.register(UNIT)
    assert slots.free(UNIT) == 192 - slots.used_bytes // UNIT - 6 == 168
