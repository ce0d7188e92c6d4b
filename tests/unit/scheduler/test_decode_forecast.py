from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.ids import MemberId
from moonpool.scheduler.decode_forecast import AHEAD_S, SLOTS, DecodeForecast, Expected, course, joined
from moonpool.scheduler.output_length import OutputLengths

FIT = (0.02, 1e-3, 3e-7)
D0, D1 = MemberId("decode-0"), MemberId("decode-1")


def learnt(median: float = 300.0) -> OutputLengths:
    lengths, rng = OutputLengths(), np.random.default_rng(0)
    for tokens in rng.lognormal(math.log(median), 0.7, 1_000):
        lengths.add("t", 1, 100, int(tokens) + 1)
    return lengths


LENGTHS = learnt()
KIND = LENGTHS.kind("t", 1, 100)
CURVE = LENGTHS.survival("t", 1, 100)

sequences = st.lists(
    st.builds(
        Expected,
        context=st.integers(1, 30_000),
        produced=st.integers(0, 800),
        most=st.integers(1, 2_000),
        kind=st.just(KIND),
        at=st.one_of(st.just(-math.inf), st.floats(0.0, 30.0)),
    ),
    min_size=1,
    max_size=8,
)


def token_by_token(expected: list[Expected], until: float) -> tuple[list[float], list[float], list[float]]:
    """Times of steps, with the expected batch and context of each; every sequence moved on step by step."""
    times, batches, contexts = [], [], []
    time, step, joined = 0.0, 0, {i: 0 for i, s in enumerate(expected) if s.at <= 0.0}
    while time < until:
        for i, sequence in enumerate(expected):
            if i not in joined and sequence.at <= time:
                joined[i] = step
        batch = context = 0.0
        for i, first in joined.items():
            s, grown = expected[i], step - first
            if grown < s.most:
                alive = float(CURVE.beyond(float(s.produced + grown), float(s.produced)))
                batch, context = batch + alive, context + alive * (s.context + grown)
        times.append(time)
        batches.append(batch)
        contexts.append(context)
        time += FIT[0] + FIT[1] * batch + FIT[2] * context
        step += 1
    return times, batches, contexts


@settings(max_examples=50, deadline=None)
@given(sequences)
def test_a_course_agrees_with_moving_every_sequence_token_by_token(expected: list[Expected]) -> None:
    found = course(expected, LENGTHS, FIT, 0.0)
    times, batches, contexts = token_by_token(expected, 16.0)
    joins = [s.at for s in expected if s.at > 0.0]
    for slot in range(0, 16, 3):
        at = float(AHEAD_S[slot])
        if any(abs(at - t) < 0.2 for t in joins):
            continue  # in one of the two it has joined already
        batch, context = (float(np.interp(at, times, values)) for values in (batches, contexts))
        limited = sum(s.most < 1.3 * 16.0 / FIT[0] for s in expected)  # may reach their last token at another step
        assert found.batch[slot] == pytest.approx(batch, rel=0.05, abs=0.05 + limited)
        assert found.context[slot] == pytest.approx(context, rel=0.05, abs=500 + 33_000 * limited)


def test_without_an_end_in_sight_a_sequence_grows_by_a_token_a_step() -> None:
    forever = OutputLengths()
    for _ in range(3_000):
        forever.add("t", 1, 100, 50_000)
    found = course([Expected(1_000, 10, 100_000, forever.kind("t", 1, 100))], forever, (0.1, 0.0, 0.0), 5.0)
    assert found.begins == 5.0
    assert found.context == pytest.approx(1_000 + 10 * AHEAD_S, rel=0.05)
    assert found.batch == pytest.approx(1.0, rel=0.05)


def test_a_sequence_leaves_at_its_last_possible_token() -> None:
    found = course([Expected(1_000, 0, 50, KIND)], LENGTHS, (0.1, 0.0, 0.0), 0.0)
    assert found.batch[4] > 0.9
    assert found.batch[5] == 0.0


def test_a_booked_prefill_counts_from_its_landing_on() -> None:
    found = course([Expected(8_000, 0, 4_000, KIND, at=110.0)], LENGTHS, FIT, 100.0)
    assert found.batch[9] == found.context[9] == 0.0
    assert found.batch[10] == pytest.approx(1.0)
    assert found.context[10] == pytest.approx(8_000, rel=0.01)
    assert found.step_s[9] == pytest.approx(FIT[0])


def test_who_may_end_any_moment_makes_a_step_uncertain() -> None:
    found = course([Expected(30_000, 300, 4_000, KIND)] * 4, LENGTHS, FIT, 0.0)
    assert found.deviation_s[0] == 0.0
    assert 0.0 < found.deviation_s[5] < found.step_s[5]


@settings(max_examples=30, deadline=None)
@given(sequences, st.integers(1, 20_000), st.one_of(st.just(-math.inf), st.floats(0.0, 45.0)))
def test_one_more_sequence_is_added_to_a_course_as_if_it_had_been_there(
    expected: list[Expected], context: int, at: float
) -> None:
    flat = (0.05, 0.0, 0.0)  # nobody slows anybody
    one = Expected(context, 0, 2_000, KIND, float(math.ceil(at)) if at > 0.0 else at)
    added = joined(course(expected, LENGTHS, flat, 0.0), one, LENGTHS, flat)
    whole = course([*expected, one], LENGTHS, flat, 0.0)
    for name in ("batch", "context", "step_s", "deviation_s"):
        assert getattr(added, name) == pytest.approx(getattr(whole, name), rel=1e-6, abs=1e-6), name


def test_an_idle_worker_has_a_course() -> None:
    found = course([], LENGTHS, FIT, 0.0)
    assert found.step_s == pytest.approx(FIT[0])
    assert found.batch.tolist() == [0.0] * SLOTS


def test_the_longest_step_of_the_window_counts_with_the_new_sequence_in_it() -> None:
    forecast = DecodeForecast()
    forecast.write(D0, course([Expected(20_000, 0, 4_000, KIND, at=107.0)], LENGTHS, FIT, 100.0), FIT)
    forecast.write(D1, course([], LENGTHS, FIT, 100.0), FIT)
    before, around, after = (forecast.ahead((D0, D1), at, 5.0, 10_000) for at in (101.0, 104.0, 160.0))
    alone = FIT[0] + FIT[1] + FIT[2] * 10_000
    assert before.step_s == pytest.approx([alone, alone])
    assert around.step_s == pytest.approx([alone + FIT[1] + FIT[2] * 20_000, alone], rel=0.05)
    assert around.batch.tolist() == [0.0, 0.0]
    assert after.step_s[0] < around.step_s[0]


def test_rows_follow_the_order_asked_for_and_strangers_are_idle() -> None:
    forecast = DecodeForecast()
    forecast.write(D0, course([Expected(20_000, 0, 4_000, KIND)], LENGTHS, FIT, 0.0), FIT)
    assert (forecast.ahead((D0, D1), 0.0, 5.0, 0).batch > 0.0).tolist() == [True, False]
    assert (forecast.ahead((D1, D0), 0.0, 5.0, 0).batch > 0.0).tolist() == [False, True]
    forecast.write(D1, course([Expected(20_000, 0, 4_000, KIND)] * 2, LENGTHS, FIT, 0.0), FIT)
    assert forecast.ahead((D1, D0), 0.0, 5.0, 0).batch.round().tolist() == [2, 1]
    forecast.forget(D0)
    assert forecast.ahead((D1, D0), 0.0, 5.0, 0).batch.round().tolist() == [2, 0]


@settings(max_examples=30, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=3), st.floats(90.0, 150.0), st.sampled_from([0.0, 3.0, 5.0, 15.0, 60.0]))
def test_all_rows_are_answered_as_each_one_alone(workers: list[list[Expected]], at: float, window: float) -> None:
    forecast, names = DecodeForecast(), tuple(MemberId(f"decode-{i}") for i in range(len(workers)))
    courses = [course(expected, LENGTHS, FIT, 100.0) for expected in workers]
    for name, known in zip(names, courses, strict=True):
        forecast.write(name, known, FIT)
    found = forecast.ahead(names, at, window, 5_000)
    for row, known in enumerate(courses):
        first = min(max(int(at - 100.0), 0), SLOTS - 1)
        steps = known.step_s[first : first + int(window) + 1]
        assert found.step_s[row] == pytest.approx(steps.max() + FIT[1] + FIT[2] * 5_000)
        assert found.context[row] == pytest.approx(known.context[first])
