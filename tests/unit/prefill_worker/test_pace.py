import pytest

from moonpool.prefill_worker.pace import LATE, LATE_FLOOR_S, LATE_SHARE, MIN_MS, SLACK, Arrivals, Pace, patience_s


def test_before_anything_was_measured_the_share_of_the_deadline_is_the_limit() -> None:
    assert Pace().limit_ms(4_096, 5_000) == 5_000


def test_blocks_may_take_about_as_long_to_come_as_to_compute() -> None:
    pace = Pace()
    pace.measured(1_000, 2.0)
    assert pace.limit_ms(500, 5_000) == int(SLACK * 1_000)
    assert pace.limit_ms(1, 5_000) == MIN_MS
    assert pace.limit_ms(1_000_000, 5_000) == 5_000


def test_a_job_without_computed_tokens_says_nothing() -> None:
    pace = Pace()
    pace.measured(0, 1.0)
    pace.measured(10, -0.1)
    assert pace.limit_ms(64, 700) == 700


def test_what_comes_from_a_node_is_expected_as_it_came_before() -> None:
    arrivals = Arrivals()
    assert arrivals.expected_s("b", 1_000) is None
    arrivals.measured("b", 1_000, 2.0)
    arrivals.measured("c", 0, 1.0)
    assert arrivals.expected_s("b", 500) == pytest.approx(1.0)
    assert arrivals.expected_s("c", 500) is None
    arrivals.measured("b", 1_000, 4.0)
    assert 1.0 < (arrivals.expected_s("b", 500) or 0.0) < 2.0


@pytest.mark.parametrize("computing", [0.0, 0.1, 1.0, 40.0])
@pytest.mark.parametrize("expected", [None, 0.001, 0.5, 100.0])
def test_waiting_adds_no_more_to_computing_than_its_bound(computing: float, expected: float | None) -> None:
    patience = patience_s(expected, computing)
    assert LATE_FLOOR_S <= patience <= max(LATE_FLOOR_S, LATE_SHARE * computing)
    if expected is not None:
        assert patience <= max(LATE_FLOOR_S, LATE * expected)
