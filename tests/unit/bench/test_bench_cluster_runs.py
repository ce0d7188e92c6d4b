"""What the measurements of whole clusters make of their records."""

from __future__ import annotations

from random import Random

import pytest

from moonpool.bench.fidelity import figures, fits_of, simulated_cluster
from moonpool.bench.overload import OverloadOptions, arrivals, growth_mib, rate_of, sends, targets_of
from moonpool.bench.overload import figures as overload_figures
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.membership import PrefillTiming, StepTiming, WorkerReport
from moonpool.core.request import Targets
from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.recording import Entry
from moonpool.sim.run import simulate

TARGETS = Targets(1_000.0, 100.0)


def record(
    index: int, *, ttft_s: float = 0.5, gap_ms: float = 50.0, outcome: Outcome = Outcome.OK, at: float = 0.0
) -> RequestRecord:
    one = RequestRecord(index, index, 0, f"r{index}", at, 100, 8, TARGETS, outcome, sent_s=at, ended_s=at + ttft_s)
    if outcome is Outcome.OK:
        one.first_text_s, one.gaps_ms = at + ttft_s, [gap_ms] * 7
    elif outcome is Outcome.REFUSED:
        one.reason, one.retry_after_s = "targets_missed", 1.0
    return one


def test_the_rate_is_that_of_the_middle_of_a_run() -> None:
    records = [record(i, at=float(i)) for i in range(40)]
    assert rate_of(records) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="too few"):
        rate_of(records[:5])


def test_targets_are_so_many_times_what_was_usual() -> None:
    targets = targets_of([record(i) for i in range(20)], 4.0)
    assert (targets.ttft_ms, targets.tbt_ms) == (pytest.approx(2_000.0), pytest.approx(200.0))


def test_accepted_requests_inside_and_outside_their_targets_are_told_apart() -> None:
    records = [
        *(record(i) for i in range(6)),
        record(6, ttft_s=1.5),
        record(7, gap_ms=150.0),
        *(record(i, ttft_s=0.02, outcome=Outcome.REFUSED) for i in range(8, 18)),
        record(18, outcome=Outcome.FAILED),
    ]
    found = overload_figures(records, 2.0, OverloadOptions(seconds=3.0))
    assert (found["accepted"], found["refused"], found["failed"], found["inside"]) == (8, 10, 1, 6)
    assert (found["missed_ttft"], found["missed_tbt"]) == (1, 1)
    assert found["inside_share"] == 0.75
    assert found["inside_over_capacity"] == pytest.approx(1.0)
    assert found["refusal_p99_ms"] == pytest.approx(20.0)
    assert found["retry_after_given"] == 1.0


def test_arrivals_come_at_the_rate_and_prompts_are_new_but_for_shared_beginnings() -> None:
    random = Random(3)
    at = arrivals(20.0, 60.0, random)
    assert 1_000 < len(at) < 1_400
    assert at == sorted(at)
    planned = sends(at, random)
    firsts = [send.hash_ids[0] for send in planned]
    assert 0.1 < sum(first < 100 for first in firsts) / len(firsts) < 0.3
    assert len({send.hash_ids[-1] for send in planned}) == len(planned)


def test_growth_is_the_last_quarter_less_the_second() -> None:
    mib = 1 << 20
    assert growth_mib([9 * mib] * 2 + [1 * mib] * 2 + [2 * mib] * 2 + [4 * mib] * 2) == pytest.approx(3.0)
    assert growth_mib([mib]) == 0.0


def test_a_cluster_simulated_with_its_own_estimates_answers_as_they_say() -> None:
    prefills = tuple(PrefillTiming(n, 0, 0.02 + 1e-3 * n) for n in (64, 128, 256, 512, 768))
    steps = tuple(StepTiming(b, c, 0.01 + 1e-3 * b) for b, c in ((1, 100), (2, 300), (4, 900), (8, 2_000)))
    entries = [Entry(1.0, WorkerReport(MemberId("w"), Incarnation(1), (), prefills=prefills, steps=steps))]
    fits = fits_of(entries, 0.005)
    assert fits.noise == pytest.approx(0.0, abs=0.01)
    rows = [TraceRow(1e4 * i, 256, 8, tuple(range(4 * i, 4 * i + 4))) for i in range(20)]
    simulated = simulate(rows, simulated_cluster(fits), admission=make_admission("none"))
    live = [record(i, ttft_s=0.02 + 0.256 + 0.005, gap_ms=11.0) for i in range(20)]
    found = figures(live, simulated)
    assert abs(found["ttft_p50_error"]) < 0.1
    assert abs(found["tbt_p50_error"]) < 0.3
    assert found["simulated_cached_share"] == 0.0


def test_too_few_measurements_to_fit_are_said() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fits_of([], 0.0)
