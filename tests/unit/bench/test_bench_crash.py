"""What the harness of kills reports: run in a process of its own, since a fork copies only the thread that calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOY = """
import json, sys, time
from pathlib import Path
from moonpool.bench.crash import Checked, crash

class Toy:
    name = "toy"
    def run(self, folder, stage):
        for n in range(int(sys.argv[2]) or 1_000_000):
            stage.begin()
            time.sleep(0.004)
            stage.note(0, n + 1)
            stage.end()
            time.sleep(0.001)
    def check(self, folder, stage):
        return Checked(stage.noted(0), () if sys.argv[3] == "good" else ("wrong bytes",))

print(json.dumps(crash([Toy()], kills=6, path=Path(sys.argv[1]), say=lambda line: None)))
"""


def _toy(folder: Path, rounds: int, check: str) -> dict[str, Any]:
    command = [sys.executable, "-c", TOY, str(folder), str(rounds), check]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def test_kills_are_counted_and_most_strike_in_the_middle(tmp_path: Path) -> None:
    figures = _toy(tmp_path, 0, "good")
    toy = figures["operations"]["toy"]
    assert (figures["kills"], toy["kills"], toy["faults"]) == (6, 6, [])
    assert 0 < toy["in_the_middle"] <= 6
    assert toy["span_ms"] >= 4
    assert toy["blocks_checked"] >= 6 * 3


def test_what_a_check_finds_is_reported(tmp_path: Path) -> None:
    figures = _toy(tmp_path, 0, "bad")
    assert figures["operations"]["toy"]["faults"] == ["wrong bytes"] * 6
    assert figures["faults"] == 6


def test_a_child_that_ends_by_itself_is_a_fault(tmp_path: Path) -> None:
    figures = _toy(tmp_path, 2, "good")
    assert figures["kills"] == 0
    assert len(figures["operations"]["toy"]["faults"]) == 6
