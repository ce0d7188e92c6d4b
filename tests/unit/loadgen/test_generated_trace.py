from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.loadgen.facts import trace_facts
from moonpool.loadgen.generate import GeneratorConfig, generate_trace
from moonpool.loadgen.trace import TraceRow, read_trace, write_trace

LONG = GeneratorConfig(requests=4_000, sessions_per_s=2.0, seed=5)


@pytest.fixture(scope="module")
def long_trace() -> list[TraceRow]:
    return generate_trace(LONG)


def test_one_seed_gives_one_trace_and_another_seed_another() -> None:
    assert generate_trace(GeneratorConfig()) == generate_trace(GeneratorConfig())
    assert generate_trace(GeneratorConfig(seed=2)) != generate_trace(GeneratorConfig())


def test_the_trace_is_a_valid_one_in_time_order_from_zero(tmp_path: Path, long_trace: list[TraceRow]) -> None:
    write_trace(tmp_path / "t.jsonl", long_trace)
    back = read_trace(tmp_path / "t.jsonl", block_tokens=LONG.block_tokens)
    assert len(back.rows) == LONG.requests
    assert back.rows[0].timestamp_ms == 0
    assert back.notes.adjusted == back.notes.unsorted == 0
    used = [h for r in back.rows for h in r.hash_ids]
    assert set(used) == set(range(max(used) + 1))


def test_an_id_always_follows_the_same_id(long_trace: list[TraceRow]) -> None:
    before: dict[int, int] = {}
    for row in long_trace:
        for parent, own in zip((-1, *row.hash_ids), row.hash_ids, strict=False):
            assert before.setdefault(own, parent) == parent


def test_lengths_and_sharing_follow_the_stated_distributions(long_trace: list[TraceRow]) -> None:
    outputs = [r.output_length for r in long_trace]
    assert min(outputs) >= LONG.output_least
    assert max(outputs) <= LONG.output_most
    assert statistics.median(outputs) == pytest.approx(LONG.output_tokens, abs=2)
    assert max(r.input_length for r in long_trace) <= LONG.max_prompt
    assert len({r.hash_ids[0] for r in long_trace}) == LONG.system_prompts
    assert trace_facts(long_trace, LONG.block_tokens).ideal_hit_share > 0.7


def test_sessions_start_as_a_poisson_process() -> None:
    alone = replace(LONG, turns=1.0)  # every session is one request: arrivals are session starts
    rows = generate_trace(alone)
    gaps = [(b.timestamp_ms - a.timestamp_ms) / 1e3 for a, b in pairwise(rows)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / alone.sessions_per_s, rel=0.06)
    assert statistics.stdev(gaps) / mean == pytest.approx(1.0, abs=0.06)


def test_sessions_take_the_stated_turns_with_short_gaps_after_tools_and_long_ones_after_users() -> None:
    config = replace(
        LONG, requests=2_000, sessions_per_s=0.4, block_tokens=1, max_prompt=1 << 20
    )  # one id per token: continuations are exact
    last_of: dict[int, TraceRow] = {}
    openings, thinking = 0, []
    for row in generate_trace(config):
        earlier = next((last_of[h] for h in reversed(row.hash_ids) if h in last_of), None)
        if earlier is None:
            openings += 1
        else:
            answered = earlier.timestamp_ms / 1e3 + config.answer_s + earlier.output_length * config.token_s
            thinking.append(row.timestamp_ms / 1e3 - answered)
            assert row.input_length > earlier.input_length + earlier.output_length
        last_of[row.hash_ids[-1]] = row
    assert config.requests / openings == pytest.approx(config.turns, rel=0.1)
    expected = config.tool_share * config.tool_gap_s + (1 - config.tool_share) * config.user_gap_s
    assert statistics.fmean(thinking) == pytest.approx(expected, rel=0.15)
    assert min(thinking) >= -0.002
    assert statistics.median(thinking) < config.tool_gap_s


def test_the_default_is_the_demonstration(long_trace: list[TraceRow]) -> None:
    rows = generate_trace(GeneratorConfig())
    facts = trace_facts(rows, 64)
    assert facts.requests == 40
    assert 500 <= facts.mean_input <= 750
    assert facts.largest_input <= 2_000
    assert 100 <= facts.span_s <= 160
    assert 16 <= facts.mean_output <= 48
    # Cold prefill at 600 tokens/s by one of two workers and decode at 60 ms a token leave two cores well below full load.
    busy = sum(r.input_length / 600 + r.output_length * 0.06 for r in rows)
    assert busy / facts.span_s < 1.2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"requests": 0}, "requests"),
        ({"sessions_per_s": 0}, "sessions_per_s"),
        ({"tool_share": 1.5}, "tool_share"),
        ({"output_most": 3}, "output_most"),
        ({"turns": 0.5}, "turns"),
        ({"length_sigma": float("nan")}, "length_sigma"),
        ({"max_prompt": 10}, "max_prompt"),
    ],
)
def test_values_that_make_no_trace_are_refused_by_name(change: dict[str, float], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate_trace(replace(GeneratorConfig(), **change))  # type: ignore[arg-type]
    assert caught.value.param == param
