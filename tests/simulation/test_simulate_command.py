from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.sim_trace import conversations
from typer.testing import CliRunner

from moonpool.cli.main import Choices, build
from moonpool.core.errors import MoonpoolError
from moonpool.loadgen.trace import write_trace

ONLY_PREFILL = '[{role = "prefill", count = 1, pool_tokens = 100000, device_tokens = 100000}]'


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.jsonl.gz"
    write_trace(path, conversations(25))
    return path


def simulate(*words: str) -> tuple[str, BaseException | None]:
    done = CliRunner().invoke(build(Choices()), ["simulate", *words])
    return done.stdout, done.exception


def test_a_trace_is_replayed_told_and_written(trace: Path, tmp_path: Path) -> None:
    words = ("--trace", str(trace), "--prefill", "2", "--decode", "1", "--policy", "algorithm1", "--seed", "3")
    told, error = simulate(*words, "--set", "link.bytes_per_s=5e9", "-o", str(tmp_path), "--json")
    assert error is None
    answer = json.loads(told)
    assert answer["figures"]["served"] == 25.0
    assert answer["settings"]["cluster"]["link"]["bytes_per_s"] == 5e9
    assert [group["count"] for group in answer["settings"]["cluster"]["groups"]] == [2, 1]
    assert {"outcome.json", "requests.jsonl", "load.jsonl", "ttft.png", "tbt.png", "load.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(25))
    assert answer["leaks"] and not any(answer["leaks"].values())


def test_in_words_come_targets_and_quantiles(trace: Path) -> None:
    told, error = simulate("--trace", str(trace), "--limit", "5", "--cluster", "llama70b_prefill")
    assert error is None
    assert "5 served, 0 refused, 0 failed" in told
    assert "TTFT" in told and "LEAKED" not in told


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--trace"),
        (("--bursts", "often"), "--bursts"),
        (("--cluster", "nowhere"), "llama70b_8p8d"),
        (("--set", "keep"), "--set"),
        (("--set", "decode.base_s=no"), "decode.base_s"),
        (("--policy", "wishful"), "wishful"),
        (("--policy", "moonpool,hope=1"), "hope"),
        (("--admission", "everybody"), "everybody"),
        (("--speed", "0"), "speed"),
        (("--set", "groups=" + ONLY_PREFILL, "--decode", "2"), "--decode"),
        (("--compare", "random,moonpool", "--roles", "auto"), "--compare"),
        (("--nodes", "4"), "add --search"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_words_are_named(words: tuple[str, ...], named: str, trace: Path) -> None:
    given = words if not words else ("--trace", str(trace), *words)
    _, error = simulate(*given)
    assert isinstance(error, MoonpoolError)
    assert named in error.message


@pytest.mark.parametrize("option", ["--prefill", "--decode", "--limit", "--seed", "--nodes"])
def test_counts_are_not_negative(option: str, trace: Path) -> None:
    told, error = simulate("--trace", str(trace), option, "-1")
    assert isinstance(error, SystemExit) and error.code == 2
    assert not told


def test_who_is_refused_is_told_with_the_reason_and_no_times(trace: Path) -> None:
    told, error = simulate("--trace", str(trace), "--limit", "3", "--set", "groups=" + ONLY_PREFILL)
    assert error is None
    assert "0 served, 3 refused (no_path 3), 0 failed" in told
    assert "0.000" not in told


def test_odd_rows_are_mended_where_asked(tmp_path: Path) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"timestamp": 0, "input_length": 700, "output_length": 2, "hash_ids": [1]}\nno row\n')
    assert isinstance(simulate("--trace", str(odd))[1], MoonpoolError)
    told, error = simulate("--trace", str(odd), "--adjust")
    assert error is None
    assert "1 served" in told
