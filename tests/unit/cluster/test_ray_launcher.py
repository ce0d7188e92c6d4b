from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent


def run(folder: Path, *words: str) -> dict[str, Any]:
    """Ray in a process of its own, as in production: it starts threads and handlers that a test run does not want."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        (sys.executable, str(HERE / "ray_house.py"), str(folder), *words),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_killed_actor_and_one_asked_to_restart_come_back_under_their_names_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found = run(tmp_path / "state")
    assert found["failures"] == []
    assert found["actors"] == ["rayhouse/conductor-0", "rayhouse/conductor-1"]
    killed, other = found["lives"]["conductor-0"], found["lives"]["conductor-1"]
    assert killed[1] > killed[0]
    assert other[1] == other[0]
    assert found["asked"][1] > found["asked"][0], "it left in order, and was started anew under its name"
    assert (found["left"], found["recorded"], found["scratch"]) == ([], [], [])


def test_too_few_cpus_are_named_at_once(tmp_path: Path) -> None:
    found = run(tmp_path / "state", "short")
    assert found["error"].startswith("ConfigError: cluster.nodes: these processes need 1.6 CPU, Ray has 1")
    assert found["seconds"] < 5
