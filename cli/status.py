"""``moonpool status`` and ``moonpool explain``: what a running cluster says about itself."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings
from moonpool.cli.running import find

if TYPE_CHECKING:
    from moonpool.cluster.survey import Answer

SHOWN_NUMBERS = 6


def status(
    name: ClusterName = None, config_file: ConfigFile = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """Who is in the cluster: liveness, incarnation, readiness and gauges of every process."""
    from moonpool.cluster.survey import survey

    running = find(name, config_file, settings)
    answers = asyncio.run(survey(running.registry))
    if as_json:
        url = running.state.url if running.state else ""
        print(json.dumps({"registry": running.registry, "url": url, "members": [a.to_json() for a in answers]}, indent=2))
        return
    _print(answers)


def _print(answers: list[Answer]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("member", "node", "state", "ready", "pid", "incarnation", "address", "gauges"):
        table.add_column(column, no_wrap=column != "gauges")
    for answer in answers:
        change = answer.change
        own = {k: v for k, v in answer.numbers.items() if v and not k.startswith("process_")}
        gauges = " ".join(f"{k}={v:g}" for k, v in list(own.items())[:SHOWN_NUMBERS])
        table.add_row(
            change.member.id,
            change.member.node,
            change.liveness.value,
            "yes" if change.member.ready else "no",
            str(change.member.pid),
            str(change.member.incarnation),
            change.member.address,
            gauges or answer.trouble or change.proof,
        )
    Console().print(table)


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="As the response header x-request-id says.")],
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Why a request went where it went: inputs, candidates, predicted and actual times."""
    from moonpool.cluster import survey
    from moonpool.core.errors import InvalidRequest

    record = asyncio.run(survey.explain(find(name, config_file, settings).registry, request_id))
    if record is None:
        raise InvalidRequest(f"REQUEST_ID: no conductor remembers {request_id!r}; the newest requests only are kept")
    print(json.dumps(json.loads(record), indent=2))
