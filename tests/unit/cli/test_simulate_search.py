"""``moonpool simulate --search`` and ``--roles`` on a trace of a few requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.cli import main
from moonpool.loadgen.trace import TraceRow, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [TraceRow(200.0 * i, 4_000, 20, tuple(range(10 * i, 10 * i + 8))) for i in range(30)])
    return path


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str) -> dict[str, Any]:
    monkeypatch.setattr("sys.argv", ["moonpool", "simulate", *command, "--json"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert not ended.value.code
    return dict(json.loads(capsys.readouterr().out))


def test_a_search_prints_the_split_and_what_was_tried(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told(capsys, monkeypatch, "--trace", str(trace), "--set", "targets.ttft_s=3", "--search", "--share", "0.9")
    assert found["share"] >= 0.9
    assert found["cost"] == found["prefill"] + found["decode"]
    assert [one for one in found["tried"] if one["suffices"]]
    best = told(capsys, monkeypatch, "--trace", str(trace), "--set", "targets.ttft_s=3", "--search", "--nodes", "4")
    assert best["prefill"] + best["decode"] == 4


def test_roles_that_follow_the_traffic_are_counted(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("--trace", str(trace), "--prefill", "1", "--decode", "7", "--set", "targets.ttft_s=3")
    outcome = told(capsys, monkeypatch, *common, "--roles", "auto,warm_s=1,hold_s=0.5")
    assert outcome["figures"]["switches"] > 0
    assert outcome["settings"]["roles"] == {"name": "auto", "warm_s": 1.0, "hold_s": 0.5}
    assert "switches" not in told(capsys, monkeypatch, *common)["figures"]


def test_unknown_roles_are_refused_by_name(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["moonpool", "simulate", "--trace", str(trace), "--roles", "often"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 2
    assert "'often' is neither fixed nor auto" in capsys.readouterr().err
