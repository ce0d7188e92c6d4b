"""Looks that run in a process of their own: a library that crashes or hangs shall not take the doctor along."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.cli.doctor.finding import Finding, fail, ok

CHILD_S = 60.0  # importing torch or ray on a crowded machine


@dataclass(frozen=True, slots=True)
class Ended:
    """``trouble`` is empty where it ended well."""

    said: str = ""
    trouble: str = ""


def run_child(command: Sequence[str], env: Mapping[str, str] | None = None, limit_s: float = CHILD_S) -> Ended:
    """Its standard output, or in one line why there is none. The child is killed when its time is over."""
    environment = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return Ended(trouble=f"no answer within {limit_s:.0f} s")
    except OSError as e:
        return Ended(trouble=f"cannot start: {e.strerror}")
    if done.returncode == 0:
        return Ended(said=done.stdout)
    if done.returncode < 0:
        return Ended(trouble=f"killed by signal {-done.returncode}")
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return Ended(trouble=lines[-1] if lines else f"exit code {done.returncode}")


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


def works(name: str, code: str, fix: str) -> Finding:
    """Whether ``code`` runs."""
    ended = run_child(python(code))
    return fail(f"{name}: {ended.trouble}", fix) if ended.trouble else ok(name)
