"""``moonpool status``: what a running cluster says about itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import Running, find
from moonpool.cli.store_view import size

if TYPE_CHECKING:
    from moonpool.cluster.survey import Answer

LONGEST_WORD = 80  # longer ones are for --json
DETAILS = ("probe", "engine")  # of what a member said when it joined


def status(
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    require_carrier: Annotated[
        str, typer.Option("--require-carrier", help="Fail unless bytes went between nodes, and by this carrier only.")
    ] = "",
    prometheus_targets: Annotated[
        str,
        typer.Option(
            "--prometheus-targets", metavar="FILE", help="Write what Prometheus shall scrape (file_sd), and no more; -: here."
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Who is in the cluster: liveness, incarnation, readiness and gauges of every process."""
    from moonpool.cluster.survey import leader_of, leaders_of, survey

    running = find(name, config_file, settings)
    if prometheus_targets:
        _write_targets(running, prometheus_targets)
        return
    answers = asyncio.run(survey(running.registry))
    if as_json:
        url = running.local.url if running.local else ""
        leading = leader_of(answers)
        leaders = {model: leader.id for model, leader in leaders_of(answers).items()}
        facts = {"registry": running.registry, "url": url, "leader": leading.id if leading else "", "leaders": leaders}
        print(json.dumps({**facts, "members": [a.to_json() for a in answers]}, indent=2))
    else:
        _print(answers)
    if require_carrier:
        _require_carrier(answers, require_carrier)


def _write_targets(running: Running, file: str) -> None:
    from moonpool.cluster.probe.targets import targets
    from moonpool.cluster.survey import members
    from moonpool.core.errors import ConfigError

    name = running.local.name if running.local else running.config.cluster.name
    found = targets(asyncio.run(members(running.registry)), name)
    text = json.dumps(found, indent=2) + "\n"
    if file == "-":
        print(text, end="")
        return
    path = Path(file)
    try:
        fresh = path.with_name(f".{path.name}.new")  # Prometheus may read it at any moment
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError as e:
        raise ConfigError(f"--prometheus-targets: cannot write {path}: {e.strerror}; give another file") from e
    say(f"{len(found)} processes to scrape: {path}")


def _require_carrier(answers: list[Answer], carrier: str) -> None:
    from moonpool.cluster.survey import carriers_between_nodes
    from moonpool.core.errors import TransferFailed

    used = carriers_between_nodes(answers)
    if used != {carrier}:
        found = ", ".join(sorted(used)) or "no bytes at all"
        raise TransferFailed(f"--require-carrier: between nodes went {found}; {carrier} only was wanted")
    say(f"between nodes: {carrier} only")


def _print(answers: list[Answer]) -> None:
    """Who leads; one line a member, then its gauges that are not zero, wrapped to the terminal."""
    from moonpool.cluster.survey import leaders_of

    leaders = leaders_of(answers)
    several = len({a.change.member.model for a in answers if a.change.member.model}) > 1
    for model, leading in leaders.items():
        print(f"leading conductor{f' of {model}' if several else ''}: {leading.id}, term {leading.term}")
    for answer in answers:
        member = answer.change.member
        ready = "ready" if member.ready else "not ready"
        print(
            f"{member.id:<14} {member.role.value:<9} node {member.node:<6} {answer.change.liveness.value:<7} {ready:<10}"
            f" pid {member.pid:<8} {member.address:<22} life {member.incarnation}"
            f"{f'  model {member.model}' if several and member.model else ''}"
        )
        own = [f"{k}={_number(k, v)}" for k, v in sorted(answer.numbers.items()) if v and not k.startswith("process_")]
        told = {**answer.words, **{k: v for k, v in member.details.items() if k in DETAILS}}
        words = [f"{k}={v}" for k, v in sorted(told.items()) if _is_plain(v)]
        notes = " ".join([*words, *own]) or answer.trouble or answer.change.proof
        if notes:
            print(fill(notes, width=get_terminal_size().columns, initial_indent="    ", subsequent_indent="    "))


def _number(name: str, value: float) -> str:
    """Bytes with a unit, counts in full."""
    if "bytes" in name.split("_"):
        return size(int(value)).replace(" ", "")
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


def _is_plain(word: str) -> bool:
    """Neither empty nor a JSON document, which are for --json."""
    return 0 < len(word) <= LONGEST_WORD and not word.startswith(("{", "[]", "[{", '["'))
