from moonpool.prefill_worker.pace import MIN_MS, SLACK, Pace


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
