"""Dynamo's KV-router core in a process of an interpreter that has it (``ai-dynamo-runtime``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError

DYNAMO = "dynamo"
LIMIT_S = 600.0


def ask_dynamo(python: str, what: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Its figures for ``what``; none where no interpreter is given. ConfigError where that one has no Dynamo."""
    if not python:
        return {}
    command = [python, str(Path(__file__).with_name("dynamo_peer.py")), what]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(settings),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(f"--peer-python: {python} gave no answer: {e}", param="--peer-python") from e
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"--peer-python: {python} cannot run Dynamo: {last}", param="--peer-python")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {f"{DYNAMO}_{name}": value for name, value in found.items()}
