"""What a run adds up to, and when it is a bad one."""

from __future__ import annotations

from collections import Counter

import pytest

from moonpool.bench.chaos.tally import (
    End,
    Ended,
    Spread,
    Struck,
    Tally,
    capacity_restored_ms,
    cause_of,
    figures,
    longest_gap_ms,
    refused_late,
    service_restored_ms,
)


def ended(sent: float, over: float, end: End = End.COMPLETED, first: float | None = None) -> Ended:
    return Ended(int(sent * 1000), "gateway-0", sent, over, end, first)


def struck(at: float, *, healed: float | None = None, restored: float | None = None, number: int = 0) -> Struck:
    return Struck(number, "kill-prefill", "a", ("prefill-0",), at, healed, restored)


def test_service_is_back_with_the_first_id_of_a_request_sent_after_the_strike() -> None:
    answers = [ended(0.5, 1.2), ended(1.1, 3.0, first=1.4), ended(1.2, 1.6)]
    assert service_restored_ms([struck(1.0)], answers) == {0: pytest.approx(400)}


def test_service_is_not_back_while_requests_are_refused() -> None:
    answers = [ended(1.1, 1.3), ended(2.0, 4.0, End.REFUSED), ended(4.5, 5.0)]
    assert service_restored_ms([struck(1.0)], answers) == {0: pytest.approx(3000)}


def test_a_strike_after_which_nothing_was_completed_has_no_time() -> None:
    assert service_restored_ms([struck(1.0)], [ended(0.5, 2.0), ended(1.5, 2.0, End.REFUSED)]) == {}


def test_a_refusal_is_put_down_to_the_first_strike_in_its_life_or_the_last_one_before() -> None:
    strikes = [struck(t, number=t) for t in (1, 5, 9)]
    assert cause_of(ended(4.0, 9.5), strikes) is strikes[1]
    assert cause_of(ended(6.0, 7.0), strikes) is strikes[1]
    assert cause_of(ended(0.1, 0.2), strikes) is None


def test_capacity_counts_from_the_end_of_the_fault() -> None:
    strikes = [struck(1, healed=3, restored=3.5), struck(4, healed=4, number=1), struck(6, number=2)]
    assert capacity_restored_ms(strikes) == {0: pytest.approx(500)}


def test_a_refusal_long_after_a_fault_is_not_excused() -> None:
    strikes = [struck(1, healed=5)]
    answers = [ended(t, t, End.REFUSED) for t in (0.5, 3.0, 14.9, 15.1, 40.0)]
    assert refused_late(strikes, answers) == 3


def test_the_longest_gap_is_seen_at_the_ends_too() -> None:
    assert longest_gap_ms([ended(0, 4), ended(0, 5)], 6.0) == pytest.approx(4000)
    assert longest_gap_ms([], 6.0) == pytest.approx(6000)


@pytest.mark.parametrize(("count", "want"), [(1, (1, 1, 1)), (100, (50, 99, 100)), (200, (100, 198, 200))])
def test_percentiles_are_of_the_nearest_rank(count: int, want: tuple[float, float, float]) -> None:
    got = Spread.of(range(count, 0, -1))
    assert (got.p50, got.p99, got.max) == want


def test_a_good_run_has_no_failures_and_says_every_name() -> None:
    tally = Tally([ended(1.1, 1.2)], [struck(1.0, healed=1.0, restored=2.0)], planned=Counter({"kill-prefill": 1}))
    found = figures(tally, 10.0)
    assert found["failures"] == []
    assert (found["requests_sent"], found["completed"], found["lost"]) == (1, 1, 0)
    assert found["faults_injected"] == {"kill-prefill": 1}
    assert found["capacity_restored_ms"] == {"p50": 1000.0, "p99": 1000.0, "max": 1000.0}


@pytest.mark.parametrize("end", [End.WRONG, End.LOST, End.BROKEN])
def test_one_wrong_or_lost_answer_fails_a_run(end: End) -> None:
    assert Tally([ended(1, 2, end)]).faults() == [f"{end.value}: 1"]


@pytest.mark.parametrize("end", [End.REFUSED, End.CUT, End.CANCELLED])
def test_a_clean_error_does_not(end: End) -> None:
    assert Tally([ended(1, 2, end)]).faults() == []


def test_a_leak_fails_a_run() -> None:
    assert Tally(leaks=["store-a: pins = 1"]).faults() == ["leaked: 1"]


def test_a_kind_that_struck_too_seldom_fails_a_run_unless_it_cannot_strike_here() -> None:
    planned = Counter({"kill-prefill": 5, "isolate": 5})
    tally = Tally(struck=[struck(1.0)], planned=planned, skipped={"isolate": "needs root"}, least=5)
    assert tally.faults() == ["kill-prefill struck 1 of 5 times"]
    assert Tally(struck=[struck(1.0)] * 5, planned=Counter({"kill-prefill": 5}), least=5).faults() == []
