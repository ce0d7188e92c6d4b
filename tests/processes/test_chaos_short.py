"""A short run of ``moonpool chaos``: real faults on a real cluster under load; no answer is wrong or lost, nothing leaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.bench.chaos.kinds import SHORT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(460)]

MINUTES, LIMIT_S = 0.3, 450
COMMAND = (sys.executable, "-m", "moonpool.cli.main", "chaos", "--minutes", str(MINUTES), "--seed", "7", "--json")


def test_a_cluster_that_is_struck_answers_everybody_rightly_and_leaks_nothing(tmp_path: Path) -> None:
    log, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
    words = ("--kinds", ",".join(SHORT), "--log", str(log), "--picture", str(picture))
    done = subprocess.run((*COMMAND, *words), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout, done.stderr[-4000:]
    figures = json.loads(done.stdout)
    assert (done.returncode, figures["failures"]) == (0, []), f"{figures}\n{done.stderr[-2000:]}"
    assert (figures["wrong"], figures["lost"], figures["leaked"]) == (0, 0, 0)
    assert set(figures["faults_injected"]) == set(SHORT) - set(figures["faults_skipped"])
    assert figures["completed"] > 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert {event["event"] for event in events} >= {"plan", "strike", "healed", "restored", "request", "over"}
    assert picture.read_bytes().startswith(b"\x89PNG")
