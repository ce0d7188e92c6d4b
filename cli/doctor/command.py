"""``moonpool doctor``: what this machine has and lacks, each line with its fix."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

import typer

from moonpool.cli.doctor.finding import Found, Grade, run_checks
from moonpool.cli.options import AsJson, ConfigFile, Settings, read_config


def doctor(config_file: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Check this machine for a configuration: each line is ok, warn or fail, with what to do about it.

    Exit code 0: all is ok, or only warned about. 1: something fails. 2: a mistake in options or configuration. It takes as
    long as its slowest check, seconds usually; each has a limit of its own.
    """
    from moonpool.cli.doctor.checks import CHECKS

    config, _ = read_config(config_file, settings)
    found: list[Found] = []
    for one in run_checks(CHECKS, config):
        found.append(one)
        if not as_json:
            print(_text(one), end="", flush=True)
    if as_json:
        print(json.dumps(told(found), indent=2))
    elif sys.stdout.isatty():
        print(_summary(found))
    raise typer.Exit(any(one.failed for one in found))


def told(found: Iterable[Found]) -> dict[str, object]:
    """As ``--json`` prints it; ``worst`` is the worst grade there is."""
    rows = [{"check": one.check, **asdict(finding)} for one in found for finding in one.findings]
    grades = {row["grade"] for row in rows}
    worst = next((grade for grade in (Grade.FAIL, Grade.WARN) if grade in grades), Grade.OK)
    return {"worst": worst, "findings": rows, "seconds": {one.check: round(one.seconds, 2) for one in found}}


def _text(one: Found) -> str:
    lines = (f"{f.grade:<5} {f.what}" + (f" -> {f.fix}" if f.fix else "") for f in one.findings)
    return "".join(f"{line}\n" for line in lines)


def _summary(found: Iterable[Found]) -> str:
    counts = Counter(finding.grade for one in found for finding in one.findings)
    return ", ".join(f"{counts[grade]} {grade}" for grade in Grade if counts[grade])
