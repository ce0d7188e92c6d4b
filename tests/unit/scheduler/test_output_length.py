from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.scheduler.output_length import EDGES, LEAN, LONGEST, OutputLengths, Survival


def learn(
    lengths: OutputLengths, tenant: str, median: float, count: int, *, turn: int = 1, prompt: int = 100, seed: int = 0
) -> None:
    rng = np.random.default_rng(seed)
    for tokens in rng.lognormal(math.log(median), 0.7, count):
        lengths.add(tenant, turn, prompt, int(tokens) + 1)


def test_a_wide_guess_serves_before_anything_was_seen() -> None:
    lengths = OutputLengths()
    guess = lengths.survival("anybody", 1, 100)
    assert not lengths.sure
    assert guess.quantile(0.5) == pytest.approx(200, rel=0.01)
    assert guess.quantile(0.9) > 5 * guess.quantile(0.5)


def test_quantiles_are_those_of_what_was_seen() -> None:
    lengths = OutputLengths()
    learn(lengths, "t", 300, 3_000)
    curve = lengths.survival("t", 1, 100)
    assert lengths.sure
    assert curve.quantile(0.5) == pytest.approx(300, rel=0.05)
    assert curve.quantile(0.9) == pytest.approx(300 * math.exp(0.7 * 1.2816), rel=0.08)
    assert curve.mean_left() == pytest.approx(300 * math.exp(0.7**2 / 2), rel=0.06)


def test_tenants_turns_and_sizes_have_their_own_curves() -> None:
    lengths = OutputLengths()
    learn(lengths, "short", 20, 500)
    learn(lengths, "long", 2_000, 500)
    learn(lengths, "long", 100, 500, turn=4)
    learn(lengths, "long", 500, 500, prompt=5_000)
    asked = [("short", 1, 100), ("long", 1, 100), ("long", 3, 900), ("long", 1, 16_000)]
    assert [lengths.survival(*one).quantile(0.5) for one in asked] == pytest.approx([20, 2_000, 100, 500], rel=0.15)


def test_a_new_tenant_is_taken_for_one_of_all_and_moves_away_from_them_by_its_own_answers() -> None:
    lengths = OutputLengths()
    learn(lengths, "known", 100, 1_000)
    medians = [lengths.survival("new", 1, 100).quantile(0.5)]
    for count in (5, 20, 400):
        learn(lengths, "new", 1_000, count)
        medians.append(lengths.survival("new", 1, 100).quantile(0.5))
    assert medians == sorted(medians)
    assert medians[0] == pytest.approx(100, rel=0.1)
    assert medians[1] < 300
    assert medians[-1] == pytest.approx(1_000, rel=0.15)


def test_an_answer_that_was_cut_off_says_only_that_it_would_have_been_longer() -> None:
    whole, cut = OutputLengths(), OutputLengths()
    rng = np.random.default_rng(1)
    for tokens in rng.exponential(500, 2_000):
        length = int(tokens) + 1
        whole.add("t", 1, 100, length)
        cut.add("t", 1, 100, min(length, 300), ended=length <= 300)
    for x in (50.0, 200.0):
        asked = [lengths.survival("t", 1, 100).beyond(x) for lengths in (whole, cut)]
        assert asked[0] == pytest.approx(asked[1], abs=0.02)
        assert asked[1] == pytest.approx(math.exp(-x / 500), abs=0.03)


def test_what_was_produced_already_is_taken_into_account() -> None:
    lengths = OutputLengths()
    for i in range(2_000):
        lengths.add("t", 1, 100, 50 if i % 2 else 1_000)
    curve = lengths.survival("t", 1, 100)
    assert curve.beyond(500.0) == pytest.approx(0.5, abs=0.05)
    assert curve.beyond(500.0, 100.0) == pytest.approx(1.0, abs=0.05)
    assert curve.beyond(30.0, 40.0) == 1.0
    assert curve.quantile(0.5, 100.0) == pytest.approx(1_000, rel=0.15)
    assert curve.mean_left(100.0) == pytest.approx(900, rel=0.15)
    assert curve.mean_left(100.0, most=200) == pytest.approx(200, rel=0.05)


def test_traffic_that_changed_is_followed() -> None:
    lengths = OutputLengths()
    learn(lengths, "t", 100, 8_000)
    learn(lengths, "t", 1_000, 16_000, seed=1)
    assert lengths.survival("t", 1, 100).quantile(0.5) > 700


def test_more_tenants_than_there_is_room_for_push_out_those_longest_without_news() -> None:
    lengths = OutputLengths(kinds=4)
    learn(lengths, "kept", 1_000, 300)
    for i in range(50):
        lengths.add(f"passing {i}", 1, 100, 10)
        lengths.add("kept", 1, 100, 1_000)
    assert lengths.survival("kept", 1, 100).quantile(0.5) > 500
    assert lengths.survival("passing 0", 1, 100).quantile(0.5) < 1_000


def test_an_unknown_turn_is_taken_for_one_of_all_requests() -> None:
    lengths = OutputLengths()
    learn(lengths, "t", 1_000, 500, turn=2)
    assert lengths.survival("", 0, 100).quantile(0.5) == pytest.approx(1_000, rel=0.15)


def test_answers_of_no_tokens_say_nothing_and_endless_ones_are_bounded() -> None:
    lengths = OutputLengths()
    lengths.add("t", 1, 0, 0)
    lengths.add("t", 1, 0, -5)
    for _ in range(200):
        lengths.add("t", 1, 0, 10**9)
    curve = lengths.survival("t", 1, 0)
    assert curve.beyond(100_000.0) > 0.5
    assert curve.quantile(0.999999) <= LONGEST


observed = st.lists(st.tuples(st.integers(1, 2_000), st.booleans()), max_size=60)


def dumb_rates(answers: list[tuple[int, bool]], parent: list[float], lean: float) -> list[float]:
    rates = []
    for b in range(len(EDGES) - 1):
        low, high = EDGES[b], EDGES[b + 1]
        here = [ended for tokens, ended in answers if low < tokens <= high]
        longer = sum(tokens > high for tokens, _ in answers)
        at_risk = longer + sum(1.0 if ended else 0.5 for ended in here)
        ended = (sum(here) + lean * (1.0 - math.exp(-parent[b] * (high - low)))) / (at_risk + lean)
        rates.append(-math.log(1.0 - ended) / (high - low))
    return rates


def dumb_survival(rates: list[float], tokens: int) -> float:
    alive, b = 1.0, 0
    for i in range(tokens):
        while EDGES[b + 1] <= i:
            b += 1
        alive *= math.exp(-rates[b])
    return alive


@settings(max_examples=25, deadline=None)
@given(observed, st.integers(0, 3_000), st.integers(0, 3_000))
def test_curves_agree_with_counting_token_by_token(answers: list[tuple[int, bool]], produced: int, more: int) -> None:
    lengths = OutputLengths()
    first = lengths.survival("t", 0, 0)
    rates = [float(rate) for rate in first.rates]
    for tokens, ended in answers:
        lengths.add("t", 1, 0, tokens, ended=ended)
    for lean in (2.0, LEAN, LEAN) if answers else (2.0, LEAN):
        rates = dumb_rates(answers, rates, lean)
    curve = lengths.survival("t", 1, 0)
    expected = dumb_survival(rates, produced + more) / dumb_survival(rates, produced)
    assert curve.beyond(float(produced + more), float(produced)) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(observed, st.floats(0, 5_000), st.floats(0.01, 0.99))
def test_a_quantile_is_where_the_curve_is(answers: list[tuple[int, bool]], produced: float, level: float) -> None:
    lengths = OutputLengths()
    for tokens, ended in answers:
        lengths.add("t", 2, 0, tokens, ended=ended)
    curve = lengths.survival("t", 2, 0)
    at = curve.quantile(level, produced)
    assert at >= produced
    assert at == LONGEST or curve.beyond(at, produced) == pytest.approx(1.0 - level, abs=1e-6)


def test_survivals_of_many_sequences_are_asked_at_once() -> None:
    curve: Survival = OutputLengths().survival("t", 1, 100)
    table = curve.beyond(np.array([[10.0, 100.0], [20.0, 200.0]]), np.array([[0.0], [10.0]]))
    assert table.shape == (2, 2)
    assert table[1, 1] == pytest.approx(float(curve.beyond(200.0, 10.0)))
