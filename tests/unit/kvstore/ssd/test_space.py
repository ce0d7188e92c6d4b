from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from support.ssd import OTHER, SMALL

from moonpool.kvstore.ssd.format import capacity, extent_of, split_extent
from moonpool.kvstore.ssd.space import Segment, Space, runs

SIZE = 1 << 17  # ten extents of SMALL, three of OTHER


def space(*layouts: object, known: bool = True) -> Space:
    out = Space()
    if known:
        out.known = {layout.fingerprint: layout for layout in (SMALL, OTHER)}
    for number, layout in enumerate(layouts):
        out.put(Segment(number, SIZE, layout, 1, 100 + number))  # type: ignore[arg-type]
    return out


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "free", "pin", "unpin"]), st.integers(0, 9)), max_size=60))
def test_extents_are_given_out_once_and_come_back_when_nobody_reads_them(steps: list[tuple[str, int]]) -> None:
    of = space(SMALL, SMALL)
    total = 2 * capacity(SIZE, SMALL)
    held: set[int] = set()
    pinned: list[int] = []
    waiting: set[int] = set()  # freed while pinned
    for what, n in steps:
        if what == "take":
            got = of.take(SMALL, n)
            assert len(got) == min(n, total - len(held) - len(waiting))
            assert not set(got) & (held | waiting)
            held |= set(got)
        elif what == "free" and held:
            extent = sorted(held)[n % len(held)]
            held.discard(extent)
            segment, position = of.segments[split_extent(extent)[0]], split_extent(extent)[1]
            segment.release(position)
            segment.release(position)  # twice is once
            if extent in pinned:
                waiting.add(extent)
        elif what == "pin" and held:
            extent = sorted(held)[n % len(held)]
            of.segments[split_extent(extent)[0]].pin(split_extent(extent)[1])
            pinned.append(extent)
        elif what == "unpin" and pinned:
            extent = pinned.pop(n % len(pinned))
            of.segments[split_extent(extent)[0]].unpin(split_extent(extent)[1])
            if extent not in pinned:
                waiting.discard(extent)
        assert of.free(SMALL) == total - len(held) - len(waiting)
        assert of.counts()["extents"] == len(held) + len(waiting)
        assert {e for e in held if of.find(e, SMALL)} == held
        assert not any(of.find(e, SMALL) for e in waiting)
        assert not any(of.find(e, OTHER) for e in held)


def test_the_fullest_segment_is_filled_first_so_that_others_run_dry() -> None:
    of = space(SMALL, SMALL)
    of.segments[1].take(4)
    assert [split_extent(e) for e in of.take(SMALL, 3)] == [(1, 4), (1, 5), (1, 6)]


def test_room_counts_what_can_be_had_without_freeing_a_known_block() -> None:
    of = space(SMALL, None, OTHER)
    per = capacity(SIZE, SMALL)
    assert of.room(SMALL) == 3 * per  # the third one is empty
    of.segments[2].take(1)
    assert of.room(SMALL) == 2 * per
    of.segments[1].retired = True
    assert of.room(SMALL) == per
    of.read_only = True
    assert of.room(SMALL) == 0
    assert of.take(SMALL, 1) == []


def test_a_segment_of_an_unknown_layout_goes_after_the_empty_ones_and_the_longest_unseen_first() -> None:
    of = space(SMALL, OTHER, OTHER, None, known=False)
    of.known = {SMALL.fingerprint: SMALL}
    of.segments[1].seen, of.segments[2].seen = 200, 100
    for number in (0, 1, 2):
        of.segments[number].take(1)
    given_out = []
    while (segment := of.blank(SMALL)) is not None:
        given_out.append(segment.number)
        of.put(Segment(segment.number, SIZE, SMALL, 9, 0))
    assert given_out == [3, 2, 1]


def test_the_emptiest_segment_whose_blocks_fit_elsewhere_is_the_one_to_empty() -> None:
    of = space(SMALL, SMALL, SMALL)
    per = capacity(SIZE, SMALL)
    for number, used in ((0, per - 2), (1, 3), (2, per - 1)):
        of.segments[number].take(used)
    victim = of.victim(OTHER)
    assert victim is not None and victim.number == 1
    of.segments[2].take(1)
    assert of.victim(OTHER) is None
    assert of.victim(SMALL) is None


def test_neighbours_form_runs_of_bounded_length() -> None:
    extents = [extent_of(0, 1), extent_of(0, 2), extent_of(0, 3), extent_of(1, 0), extent_of(1, 0), extent_of(1, 1)]
    assert runs(extents, 2) == [extents[:2], extents[2:3], extents[3:4], extents[4:]]
    assert runs([], 2) == []
