"""``moonpool simulate --suite`` and ``--compare``: many simulations, one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moonpool.cli.options import named, say

if TYPE_CHECKING:
    from moonpool.loadgen.trace import TraceRow
    from moonpool.sim.cluster import SimCluster
    from moonpool.sim.suite.paper import Subset

SUITES = ("paper",)
SUBSETS: tuple[Subset, ...] = ("all", "ci", "tuning")


def run_suite(
    name: str,
    *,
    traces: Path | None,
    subset: str,
    only: Sequence[str],
    folder: Path | None,
    processes: int,
    as_json: bool,
) -> None:
    """Prints the table, or one JSON document, on standard output; progress goes to standard error."""
    from moonpool.core.errors import ConfigError
    from moonpool.sim.suite import paper
    from moonpool.sim.suite.report import in_words

    if name not in SUITES:
        raise ConfigError(f"--suite: {name!r} is none of {', '.join(SUITES)}", param="--suite")
    chosen = next((known for known in SUBSETS if known == subset), None)
    if chosen is None:
        raise ConfigError(f"--subset: {subset!r} is none of {', '.join(SUBSETS)}", param="--subset")
    if traces is not None and not any(traces.glob("*_trace.jsonl*")):
        message = (
            f"--traces: {traces} holds neither conversation_trace.jsonl.gz nor synthetic_trace.jsonl.gz; give their folder"
        )
        raise ConfigError(message, param="--traces")
    wanted = [pattern.strip() for text in only for pattern in text.split(",") if pattern.strip()]
    report = paper.run_suite(
        traces=traces,
        subset=chosen,
        only=wanted,
        folder=folder,
        processes=processes,
        tell=say,
    )
    typer.echo(json.dumps(report.as_json(), indent=1) if as_json else in_words(report))


@dataclass(frozen=True, slots=True)
class Compared:
    """What every policy gets: the same requests, the same cluster, an admission of the same name and settings."""

    rows: Sequence[TraceRow]
    cluster: SimCluster
    admission: tuple[str, dict[str, float]]
    speed: float
    spread: bool
    seed: int


def compare_policies(names: str, given: Compared, *, folder: Path | None, as_json: bool) -> None:
    """``names``: policies, with commas, each with its settings behind it. ``folder`` gets the picture."""
    from moonpool.scheduler.admission.make import make_admission
    from moonpool.scheduler.policies.make import make_policy
    from moonpool.sim.compare import compared, draw, table
    from moonpool.sim.run import simulate

    made = {text: make_policy(*named(text, "--compare")) for text in _policies(names)}  # a wrong name ends it before any runs
    outcomes = {}
    for text, policy in made.items():
        say(f"{text}: {len(given.rows)} requests")
        outcomes[text] = simulate(
            given.rows,
            given.cluster,
            policy=policy,
            admission=make_admission(*given.admission),
            speed=given.speed,
            bursts="spread" if given.spread else "released",
            seed=given.seed,
        )
    typer.echo(json.dumps(compared(outcomes), indent=2) if as_json else table(outcomes))
    if folder is not None:
        say(f"wrote {draw(folder, outcomes)}")


def _policies(names: str) -> list[str]:
    """``a,x=1,b`` is ``a,x=1`` and ``b``."""
    from moonpool.core.errors import ConfigError

    found: list[str] = []
    for part in filter(None, (part.strip() for part in names.split(","))):
        if "=" in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    if len(set(found)) < 2:
        raise ConfigError(f"--compare: {names!r} is one policy; give two or more, with commas", param="--compare")
    return list(dict.fromkeys(found))
