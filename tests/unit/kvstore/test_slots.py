"""Free runs against a plain set, and the table of legal transitions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moonpool.core.errors import Bug
from moonpool.kvstore.slots import LEGAL, FreeRuns, SlotMap, SlotState


@given(
    regions=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40),
)
def test_free_runs_hand_out_and_take_back_every_slot_once(regions: list[int], steps: list[tuple[bool, int]]) -> None:
    borders = [sum(regions[:i]) for i in range(len(regions) + 1)]
    runs, free, out = FreeRuns(borders), set(range(borders[-1])), []
    for take, n in steps:
        if take and n <= len(free):
            longest = longest_run(free, borders)
            got = runs.take(n)
            assert len(set(got)) == n
            assert set(got) <= free
            assert got == sorted(got)
            if 0 < n <= longest:
                assert got == list(range(got[0], got[0] + n)), "one run was long enough"
                assert sum(b <= got[0] for b in borders) == sum(b <= got[-1] for b in borders), "a run lies in one region"
            free -= set(got)
            out += got
        elif not take and out:
            slot = out.pop(n % len(out))
            runs.give(slot)
            free.add(slot)
        assert runs.count == len(free)
    for slot in out:
        runs.give(slot)
    assert runs.take(borders[-1]) == list(range(borders[-1]))


def longest_run(free: set[int], borders: list[int]) -> int:
    longest = length = 0
    for slot in range(borders[-1]):
        length = 0 if slot not in free else 1 if slot in borders else length + 1
        longest = max(longest, length)
    return longest


@pytest.mark.parametrize("old", SlotState)
@pytest.mark.parametrize("new", SlotState)
def test_only_legal_transitions_are_made(old: SlotState, new: SlotState) -> None:
    ways = {
        SlotState.FREE: [],
        SlotState.RESERVED: ["take"],
        SlotState.FENCED: ["take", "fence"],
        SlotState.SEALED: ["take", "seal"],
    }
    steps = {SlotState.FENCED: SlotMap.fence, SlotState.SEALED: SlotMap.seal, SlotState.FREE: SlotMap.release}
    slots = SlotMap(4096, [1])
    for way in ways[old]:
        slots.take(1) if way == "take" else getattr(slots, way)(0)
    assert slots.state(0) is old
    if new is SlotState.RESERVED:
        assert (slots.free == 1) == (new in LEGAL[old])
    elif new in LEGAL[old]:
        steps[new](slots, 0)
        assert slots.state(0) is new
    else:
        with pytest.raises(Bug, match="no legal transition"):
            steps[new](slots, 0)


def test_places_are_found_again_by_region_and_offset_and_nowhere_else() -> None:
    slots = SlotMap(4096, [2, 3])
    places = [slots.ref(slot, b"k") for slot in range(5)]
    assert [(p.region, p.offset) for p in places] == [(0, 0), (0, 4096), (1, 0), (1, 4096), (1, 8192)]
    assert [slots.at(p.region, p.offset) for p in places] == list(range(5))
    assert [slots.at(*p) for p in [(0, 8192), (0, 1), (2, 0), (-1, 0), (0, -4096)]] == [None] * 5
