"""Sums of a usage log, against a dumb count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moonpool.cli.main import Choices, build
from moonpool.cluster.usage_report import LINE_CHARS, lines_of, report
from moonpool.core.errors import ConfigError

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "choices", "attempts")


def entry(**values: Any) -> dict[str, Any]:
    basis = {"time": "2026-11-30T01:02:03.004+00:00", "id": "req-1", "tenant": "a", "model": "m", "endpoint": "chat"}
    counts = dict.fromkeys(COUNTS, 1)
    return {**basis, "outcome": "ok", **counts, "ttft_ms": 5.0, "duration_ms": 9.0, "gateway": "gateway-0", **values}


entries = st.builds(
    lambda tenant, model, day, outcome, n, ttft: entry(
        tenant=tenant, model=model, time=f"2026-11-{day:02d}T00:00:00+00:00", outcome=outcome, ttft_ms=ttft,
        **dict.fromkeys(COUNTS, n),
    ),
    st.sampled_from("ab"),
    st.sampled_from("mn"),
    st.integers(1, 3),
    st.sampled_from(("ok", "no_path")),
    st.integers(0, 9),
    st.none() | st.floats(0, 100),
)  # fmt: skip


@given(
    st.lists(entries, max_size=30), st.lists(st.sampled_from(("tenant", "model", "day")), min_size=1, max_size=3, unique=True)
)
def test_totals_are_what_counting_line_by_line_gives(lines: list[dict[str, Any]], by: list[str]) -> None:
    found = report(map(json.dumps, lines), by)
    assert found.total.requests == len(lines) == sum(one.requests for one in found.groups.values())
    for group, one in found.groups.items():
        mine = [e for e in lines if tuple(e["time"][:10] if b == "day" else e[b] for b in by) == group]
        assert one.requests == len(mine)
        assert one.answered == sum(e["outcome"] == "ok" for e in mine)
        assert one.refused == sum(e["outcome"] != "ok" and not e["completion_tokens"] for e in mine)
        assert [getattr(one, name) for name in COUNTS] == [sum(e[name] for e in mine) for name in COUNTS]
        ttft = [e["ttft_ms"] for e in mine if e["ttft_ms"] is not None]
        mean = one.to_json()["mean_ttft_ms"]
        assert mean == (pytest.approx(sum(ttft) / len(ttft), abs=1e-3) if ttft else None)


@pytest.mark.parametrize("bad", ["{", "[]", '{"time": 1}', '{"time": "x", "tenant": "a"}', "null"])
def test_lines_that_are_none_are_left_out_and_counted(bad: str) -> None:
    found = report([bad, json.dumps(entry()), "\n"], ["tenant"])
    assert (found.total.requests, found.unreadable) == (1, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"tenant": "\ud800"},
        {"tenant": "a\x1b[2J"},
        {"model": "m\nn"},
        {"prompt_tokens": 10**400},
        {"prompt_tokens": -1},
        {"choices": True},
        {"attempts": 1.0},
        {"ttft_ms": float("nan")},
        {"ttft_ms": 10**400},
        {"duration_ms": float("inf")},
    ],
    ids=str,
)
def test_a_damaged_line_is_left_out_whatever_is_wrong_with_it(bad: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    write(log, entry(), entry(**bad))
    for more in ([], ["--json"]):
        result = CliRunner().invoke(build(Choices()), ["usage", str(log), *more])
        assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["total"]["requests"], shown["unreadable"]) == (1, 1)


def test_a_line_without_an_end_is_not_read_as_one(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    log.write_bytes(b"\0" * 300_000 + b"\n" + json.dumps(entry()).encode())
    assert max(map(len, lines_of(log))) == LINE_CHARS
    assert report(lines_of(log), ["tenant"]).total.requests == 1


def write(path: Path, *entries: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in entries))


def test_full_logs_beside_the_one_being_written_are_summed_too_oldest_first(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    for number in range(1, 12):
        write(tmp_path / f"usage.jsonl.{number}", entry(id=f"req-{number}"))
    write(log, entry(id="req-0"))
    (tmp_path / "usage.jsonl.lock").write_text("no usage")
    assert [json.loads(line)["id"] for line in lines_of(log)] == [f"req-{number}" for number in range(11, -1, -1)]
    with pytest.raises(ConfigError, match="there is no usage log"):
        list(lines_of(tmp_path / "other.jsonl"))


def test_the_verb_sums_by_what_is_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    write(log, entry(), entry(tenant="b", model="n", prompt_tokens=70), entry(tenant="b", model="m"))
    runner, app = CliRunner(), build(Choices())
    told = json.loads(runner.invoke(app, ["usage", str(log), "--by", "tenant", "--by", "model", "--json"]).stdout)
    assert [(one["tenant"], one["model"], one["prompt_tokens"]) for one in told["groups"]] == [
        ("a", "m", 1), ("b", "m", 1), ("b", "n", 70),
    ]  # fmt: skip
    assert told["total"]["prompt_tokens"] == 72
    shown = runner.invoke(app, ["usage", str(log), "--set", f"gateway.usage_log={log}"]).stdout.splitlines()
    assert shown[0].split()[:2] == ["tenant", "requests"] and shown[-1].split()[:2] == ["total", "3"]
