"""Kills between processes, a few of each: the count that matters is taken by the command itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes
NAMES = ("put", "push", "take")


def test_nothing_is_wrong_or_lost_after_a_few_kills_of_each_operation() -> None:
    only = [part for name in NAMES for part in ("--only", name)]
    command = [sys.executable, "-m", "moonpool.cli.main", "bench", "crash", "--kills", "3", "--seed", "5", *only, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["kills"], figures["faults"]) == (9, 0)
    for name in NAMES:
        one = figures["operations"][name]
        assert one["blocks_checked"] > 0
        assert one["span_ms"] > 0
