"""``moonpool simulate --suite`` and ``--compare``: many simulations, one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moonpool.cli.options import say

if TYPE_CHECKING:
    from moonpool.loadgen.trace import TraceRow
    from moonpool.sim.cluster import SimCluster
    from moonpool.sim.suite.paper import Subset

SUITES = ("paper",)
SUBSETS: tuple[Subset, ...] = ("all", "ci", "tuning")


def suite(
    name: str,
    *,
    traces: Path | None,
    subset: str | None,
    only: Sequence[str],
    folder: Path | None,
    processes: int,
    as_json: bool,
) -> None:
    """Prints the table, or one JSON document, on standard output; progress goes to standard error."""
    from moonpool.core.errors import ConfigError
    from moonpool.sim.suite.paper import run_suite
    from moonpool.sim.suite.report import in_words

    if name not in SUITES:
        raise ConfigError(f"--suite: {name!r} is none of {', '.join(SUITES)}", param="--suite")
    chosen = next((known for known in SUBSETS if known == (subset or "all")), None)
    if chosen is None:
        raise ConfigError(f"--subset: {subset!r} is none of {', '.join(SUBSETS)}", param="--subset")
    wanted = [pattern.strip() for text in only for pattern in text.split(",") if pattern.strip()]
    report = run_suite(
        traces=traces,
        subset=chosen,
        only=wanted,
        folder=folder,
        processes=processes,
        tell=say,
    )
    typer.echo(json.dumps(report.as_json(), indent=1) if as_json else in_words(report))


def compare(
    names: str,
    rows: Sequence[TraceRow],
    cluster: SimCluster,
    *,
    admission: str,
    speed: float,
    folder: Path | None,
    as_json: bool,
) -> None:
    """``names``: policies, with commas: each gets the same requests and the same cluster. ``folder`` gets the picture."""
    from moonpool.core.errors import ConfigError
    from moonpool.scheduler.admission.make import make_admission
    from moonpool.scheduler.policies.make import make_policy
    from moonpool.sim.compare import compared, draw, table
    from moonpool.sim.run import simulate

    policies = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if len(policies) < 2:
        raise ConfigError(f"--compare: {names!r} is one policy; give two or more, with commas", param="--compare")
    made = {name: make_policy(name) for name in policies}  # a wrong name ends it before any of them runs
    outcomes = {}
    for name, policy in made.items():
        say(f"{name}: {len(rows)} requests")
        outcomes[name] = simulate(rows, cluster, policy=policy, admission=make_admission(admission), speed=speed)
    typer.echo(json.dumps(compared(outcomes), indent=2) if as_json else table(outcomes))
    if folder is not None:
        say(str(draw(folder, outcomes)))
