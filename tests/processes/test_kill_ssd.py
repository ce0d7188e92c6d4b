"""The SSD tier is killed while it writes, reads and moves blocks; then every byte found is right and all space is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

KILLS = 12  # per operation; `moonpool bench crash` kills 40 times


@pytest.mark.parametrize("operation", ["demote", "promote", "compact"])
def test_nothing_wrong_is_read_and_no_space_is_lost_after_a_kill(operation: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moonpool.cli.main", "bench", "crash", "--json"]
    command += ["--kills", str(KILLS), "--only", operation, "--path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)["operations"][operation]
    assert figures["faults"] == []
    assert figures["kills"] == KILLS
    assert figures["in_the_middle"] > 0
    assert figures["blocks_checked"] > 0
