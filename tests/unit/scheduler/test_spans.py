"""How a prompt is cut between prefill workers, against trying every cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.scheduler.spans import Seat, cut, timed

A800 = (0.0679, 1.0966e-4, 7.43e-10, 2.57e-6)  # LLaMA-3-70B, Mooncake (FAST 2025), fig. 14
LAYERS = 80
BLOCK = 512


def seat(free_s: float = 0.0, *, hop_s: float = 0.0, latency_s: float = 0.0) -> Seat:
    a, b, c, d = A800
    return Seat(free_s, a, b, c, d, hop_s, latency_s)


def test_equal_workers_get_spans_of_equal_time_that_shrink_along_the_prompt() -> None:
    seats = [seat() for _ in range(4)]
    bounds = cut(0, 65_536, BLOCK, seats, LAYERS)
    assert bounds is not None
    tokens = [end - begin for begin, end in pairwise(bounds)]
    assert tokens == sorted(tokens, reverse=True) and tokens[-1] < 0.75 * tokens[0]
    took = [one.seconds(begin, end) for one, (begin, end) in zip(seats, pairwise(bounds), strict=True)]
    assert max(took) - min(took) < seats[0].seconds(60_000, 60_000 + BLOCK) - A800[0]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_group_takes_its_longest_span_and_one_layer_for_each_that_follows(count: int) -> None:
    seats = [Seat(0.0, 0.0, 1e-4, 0.0)] * count
    bounds = cut(0, count * 100 * BLOCK, BLOCK, seats, LAYERS)
    assert bounds is not None
    ends = timed(bounds, seats, LAYERS)[-1].ends_s
    assert ends == pytest.approx(100 * BLOCK * 1e-4 * (1 + (count - 1) / LAYERS), rel=1e-6)


def test_who_is_free_later_gets_a_span_that_is_shorter_by_as_much() -> None:
    seats = [seat(), seat(0.5), seat(2.0)]
    bounds = cut(1_024, 60_000, BLOCK, seats, LAYERS)
    assert bounds is not None
    spans = timed(bounds, seats, LAYERS)
    assert spans[1].begins_s == 0.5 and spans[2].begins_s == 2.0
    assert max(span.ends_s for span in spans) - min(span.ends_s for span in spans) < 0.2


def test_a_slow_link_between_two_workers_holds_the_later_one_up() -> None:
    bounds = (0, 16_384, 24_576)
    fast = timed(bounds, [seat(), seat(hop_s=1e-6)], LAYERS)[-1]
    slow = timed(bounds, [seat(), seat(hop_s=1e-3)], LAYERS)[-1]
    assert fast.ends_s == pytest.approx(timed(bounds, [seat(), seat()], LAYERS)[-1].ends_s, rel=0.02)
    assert slow.ends_s >= 16_384 * 1e-3, "all that lies before its span has to come first"


def test_nothing_is_cut_where_somebody_would_get_nothing() -> None:
    assert cut(0, 3 * BLOCK - 1, BLOCK, [seat()] * 3, LAYERS) is None
    assert cut(0, 20 * BLOCK, BLOCK, [seat(), seat(60.0)], LAYERS) is None, "it is free once all is done"
    assert cut(0, 20 * BLOCK, BLOCK, [seat()], LAYERS) is None
    assert cut(0, 20 * BLOCK, BLOCK, [seat()] * 2, 1) is None, "there is no layer to work ahead on"


@st.composite
def groups(draw: st.DrawFn) -> list[Seat]:
    frees = sorted(draw(st.lists(st.floats(0.0, 1.5), min_size=2, max_size=3)))
    hop = draw(st.sampled_from([0.0, 3e-6, 3e-5]))
    b, c = draw(st.floats(5e-5, 5e-4)), draw(st.sampled_from([0.0, 7e-10, 2e-8]))
    return [Seat(free, draw(st.floats(0.0, 0.1)), b, c, 2e-6, hop, 1e-3 if hop else 0.0) for free in frees]


@given(groups(), st.integers(6, 24), st.integers(0, 4), st.integers(0, BLOCK - 1), st.sampled_from([2, 32, 80]))
@settings(max_examples=60, deadline=None)
def test_no_cut_is_sooner_by_more_than_a_block(seats: list[Seat], blocks: int, cached: int, tail: int, layers: int) -> None:
    begin, end = cached * BLOCK, (cached + blocks) * BLOCK + tail
    bounds = cut(begin, end, BLOCK, seats, layers)
    inner = range(cached + 1, cached + blocks + bool(tail))
    best = min(
        timed((begin, *(one * BLOCK for one in chosen), end), seats, layers)[-1].ends_s
        for chosen in combinations(inner, len(seats) - 1)
    )
    block_s = seats[-1].b * BLOCK + seats[-1].c * (end * end - (end - BLOCK) ** 2)
    if bounds is None:
        return
    assert bounds[0] == begin and bounds[-1] == end and all(one < other for one, other in pairwise(bounds))
    assert all(bound % BLOCK == 0 for bound in bounds[1:-1])
    found = timed(bounds, seats, layers)[-1].ends_s
    assert found <= best + 1.5 * block_s + 2 * seats[-1].latency_s


def test_nothing_is_cut_for_a_worker_whose_tokens_seem_to_cost_nothing() -> None:
    seats = [seat(), Seat(0.0, 0.07, 0.0, 0.0), seat()]
    assert cut(0, 65_536, BLOCK, seats, LAYERS) is None
