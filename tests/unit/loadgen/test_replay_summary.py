from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.request import Targets
from moonpool.loadgen.record import Outcome, RequestRecord, slowest_tenth
from moonpool.loadgen.summary import RunFacts, Summary, lag_of, quantiles, summarise


def record(
    index: int = 0,
    planned: float = 0.0,
    *,
    lag: float = 0.0,
    ttft: float | None = 0.2,
    gaps: tuple[float, ...] = (10.0, 10.0),
    outcome: Outcome = Outcome.OK,
    targets: Targets | None = None,
    reason: str = "",
) -> RequestRecord:
    sent = planned + lag
    first = sent + ttft if ttft is not None else None
    last = first + sum(gaps) / 1e3 if first is not None else None
    return RequestRecord(
        index=index,
        row=index + 1,
        loop=0,
        request_id=f"r-{index}",
        planned_s=planned,
        input_tokens=100,
        output_tokens=3,
        targets=targets or Targets(),
        outcome=outcome,
        sent_s=sent,
        ended_s=(last or sent) + 0.001,
        status=200 if outcome is Outcome.OK else 429,
        reason=reason,
        first_text_s=first,
        last_text_s=last,
        gaps_ms=list(gaps),
        prompt_tokens=100,
        completion_tokens=len(gaps) + 1,
        cached_tokens=64,
    )


def summary_of(*records: RequestRecord, targets: Targets | None = None, cap: int = 0, held: int = 0) -> Summary:
    span = records[-1].planned_s if records else 0.0
    return summarise(records, RunFacts(len(records), span, targets or Targets(), cap=cap, held_back=held))


def test_service_latency_counts_from_the_send_and_schedule_latency_from_the_plan() -> None:
    r = record(planned=3.0, lag=0.5, ttft=0.2)
    assert r.lag_ms == pytest.approx(500)
    assert r.ttft_ms == pytest.approx(200)
    assert r.schedule_ttft_ms == pytest.approx(700)
    assert r.latency_ms == pytest.approx(221)
    assert r.schedule_latency_ms == pytest.approx(721)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=200))
def test_tbt_is_the_mean_of_the_slowest_tenth_of_the_gaps(gaps: list[float]) -> None:
    count = max(1, math.ceil(len(gaps) * 0.1))
    assert slowest_tenth(gaps) == pytest.approx(statistics.fmean(sorted(gaps, reverse=True)[:count]))


def test_tpot_is_per_token_after_the_first_by_the_servers_count() -> None:
    r = record(gaps=(10.0, 20.0))
    assert r.tpot_ms == pytest.approx(15)
    r.completion_tokens = 7  # several tokens came in one piece of text
    assert r.tpot_ms == pytest.approx(5)
    r.completion_tokens = None
    assert r.tpot_ms == pytest.approx(15)
    assert record(gaps=()).tpot_ms is None
    assert record(gaps=()).tbt_ms is None


TTFT_AND_TBT = Targets(ttft_ms=300, tbt_ms=50)


@pytest.mark.parametrize(
    ("made", "met"),
    [
        (record(targets=TTFT_AND_TBT), True),
        (record(targets=TTFT_AND_TBT, ttft=0.301), False),
        (record(targets=TTFT_AND_TBT, lag=0.2), False),  # late because the client was: the user waited all the same
        (record(targets=TTFT_AND_TBT, gaps=(10.0, 51.0)), False),
        (record(targets=TTFT_AND_TBT, gaps=()), True),
        (record(targets=Targets(tbt_ms=50), ttft=99), True),
        (record(targets=TTFT_AND_TBT, outcome=Outcome.REFUSED, ttft=None), False),
        (record(targets=TTFT_AND_TBT, outcome=Outcome.FAILED), False),
        (record(), None),
    ],
)
def test_a_request_meets_its_targets_or_does_not_or_has_none(made: RequestRecord, met: bool | None) -> None:
    assert made.met_targets is met


def test_goodput_is_requests_per_second_that_met_every_target() -> None:
    records = [record(i, i * 1.0, targets=TTFT_AND_TBT, ttft=0.2 if i % 2 else 0.9) for i in range(10)]
    found = summary_of(*records, targets=TTFT_AND_TBT)
    assert found.goodput is not None
    assert (found.goodput.met, found.goodput.of) == (5, 10)
    assert found.goodput.per_s == pytest.approx(5 / found.duration_s)


def test_without_targets_there_is_no_goodput() -> None:
    assert summary_of(record()).goodput is None


def test_refusals_are_counted_apart_with_their_reasons() -> None:
    refused = record(1, outcome=Outcome.REFUSED, ttft=None, reason="targets_missed")
    refused.retry_after_s = 2.5
    broken = record(2, outcome=Outcome.FAILED, reason="timed out")
    found = summary_of(record(0), refused, broken)
    assert (found.ok, found.refused, found.failed) == (1, 1, 1)
    assert found.refusals == {"targets_missed": 1}
    assert found.failures == {"timed out": 1}
    assert found.retry_after_s is not None
    assert found.retry_after_s.p50 == 2.5
    assert found.ttft_ms is not None
    assert found.ttft_ms.n == 1
    assert found.prompt_tokens == 100


def test_lengths_the_server_counts_otherwise_are_noticed() -> None:
    other, short = record(0), record(1)
    other.prompt_tokens = 101
    short.output_tokens = 9
    found = summary_of(other, short, record(2))
    assert (found.prompt_length_mismatches, found.output_length_mismatches) == (1, 1)


def test_the_lag_histogram_holds_every_send_and_flags_a_client_that_fell_behind() -> None:
    on_time = lag_of([record(i, i, lag=0.0005) for i in range(100)], 99)
    assert on_time is not None
    assert on_time.histogram[0] == 100
    assert not on_time.behind
    late = lag_of([record(i, i, lag=0.0005 if i < 50 else 2.0) for i in range(100)], 99)
    assert late is not None
    assert (late.histogram[0], late.histogram[-1]) == (50, 50)
    assert late.behind
    assert late.allowed_ms == pytest.approx(99)


def test_nothing_sent_gives_a_summary_without_latencies() -> None:
    found = summary_of()
    assert found.ttft_ms is None
    assert found.lag is None
    assert found.completed_per_s == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_quantiles_are_values_that_occurred(values: list[float]) -> None:
    found = quantiles([*values, None])
    assert found is not None
    ordered = sorted(values)
    assert found.n == len(values)
    for q, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value in values
        assert sum(v <= value for v in ordered) >= q * len(ordered) - 1e-9
    assert found.max == ordered[-1]
