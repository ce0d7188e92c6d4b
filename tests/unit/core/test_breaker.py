"""A circuit breaker against its own words: what may be tried when, for how long not, and that it always recovers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.breaker import Breaker, Pace, State, wait_s

PACE = Pace(failures=3, first_s=1.0, longest_s=8.0, probe_s=5.0)

steps = st.lists(
    st.tuples(st.sampled_from(["begin", "succeeded", "failed", "given up", "nothing"]), st.floats(0, 12), st.floats(0, 0.999)),
    max_size=60,
)


class Words:
    """The breaker as its description says it, by looking through everything that ever happened."""

    def __init__(self) -> None:
        self.closed, self.row, self.times = True, 0, 0
        self.until, self.probe = 0.0, -1.0

    def tell(self, what: str, now: float, draw: float) -> None:
        half = not self.closed and now >= self.until
        if what == "failed" and (self.closed or half):
            self.row = self.row + 1 if self.closed else PACE.failures
            if self.row >= PACE.failures:
                self.times += 1
                whole = min(PACE.longest_s, PACE.first_s * 2 ** (self.times - 1))
                self.closed, self.until, self.probe, self.row = False, now + whole * (1 + draw) / 2, -1.0, 0
        elif what == "succeeded" and (self.closed or half):
            self.closed, self.row, self.times, self.probe = True, 0, 0, -1.0
        elif what == "begin" and half and now >= self.probe:
            self.probe = now + PACE.probe_s
        elif what == "given up" and half:
            self.probe = -1.0

    def allows(self, now: float) -> bool:
        return self.closed or (now >= self.until and now >= self.probe)


@given(steps)
def test_it_does_what_its_words_say(told: list[tuple[str, float, float]]) -> None:
    breaker, words, now = Breaker(PACE), Words(), 0.0
    for what, passed, draw in told:
        now += passed
        words.tell(what, now, draw)
        match what:
            case "begin":
                breaker.begin(now)
            case "succeeded":
                breaker.succeeded(now)
            case "failed":
                breaker.failed(now, draw)
            case "given up":
                breaker.given_up(now)
        assert breaker.allows(now) == words.allows(now)
        assert (breaker.state(now) is State.CLOSED) == words.closed


@given(steps)
def test_whatever_happened_a_try_goes_through_again_and_its_success_closes(told: list[tuple[str, float, float]]) -> None:
    breaker, now = Breaker(PACE), 0.0
    for what, passed, draw in told:
        now += passed
        if what == "failed":
            breaker.failed(now, draw)
        elif what == "begin":
            breaker.begin(now)
    now += PACE.longest_s + PACE.probe_s
    assert breaker.allows(now)
    breaker.begin(now)
    breaker.succeeded(now)
    assert breaker.state(now) is State.CLOSED


def test_half_open_lets_one_try_through_and_no_second_before_it_ends() -> None:
    breaker = Breaker(PACE)
    for _ in range(3):
        assert breaker.allows(0.0)
        breaker.failed(0.0, draw=0.5)
    assert not breaker.allows(0.7)
    assert breaker.allows(0.75), "the first wait, in the middle of its jitter"
    breaker.begin(0.75)
    assert not breaker.allows(0.8)
    breaker.given_up(0.9)
    assert breaker.allows(0.9)
    breaker.begin(0.9)
    breaker.failed(1.0, draw=0.5)
    assert not breaker.allows(2.4) and breaker.allows(2.5), "twice as long"


def test_a_success_of_before_does_not_close_an_open_one() -> None:
    breaker = Breaker(PACE)
    for _ in range(3):
        breaker.failed(0.0, draw=0.0)
    breaker.succeeded(0.1)
    assert breaker.state(0.1) is State.OPEN


@pytest.mark.parametrize(("times", "least", "most"), [(1, 0.5, 1.0), (3, 2.0, 4.0), (60, 4.0, 8.0)])
def test_waits_double_up_to_a_limit_with_jitter(times: int, least: float, most: float) -> None:
    assert wait_s(PACE, times, 0.0) == least
    assert least < wait_s(PACE, times, 0.5) < wait_s(PACE, times, 0.999) < most
