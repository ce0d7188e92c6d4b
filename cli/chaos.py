"""``moonpool chaos``: strikes a live local cluster under load, checks every answer, and says what became of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.cli.options import AsJson, Settings


def chaos(
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="Of load; 10 or more: each kind strikes 5 times.")
    ] = 20.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the schedule and of what clients ask.")] = 0,
    kinds: Annotated[str, typer.Option("--kinds", help="Kinds of faults, with commas; `kill` is every kill-... .")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Show the kinds of faults, and what each needs.")] = False,
    model: Annotated[str, typer.Option("--model", help="Model name or directory; left out: a tiny random one.")] = "",
    registry: Annotated[str, typer.Option("--registry", help="embedded, or etcd.")] = "embedded",
    log: Annotated[Path | None, typer.Option("--log", help="File for what happened when, one JSON object a line.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="PNG of the run on a time line.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the cluster's folder with its logs.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Kill, stop, cut, delay and damage a live local cluster under load; exit code 1 when an answer was wrong or lost."""
    from moonpool.bench.chaos.kinds import KINDS
    from moonpool.core.errors import ConfigError

    if list_:
        for kind in KINDS:
            typer.echo(f"{kind.name:<24} {kind.says}{f' (needs {kind.need.value})' if kind.need else ''}")
        return
    if registry not in ("embedded", "etcd"):
        raise ConfigError(f"--registry: {registry!r} is unknown; use embedded or etcd", param="--registry")
    for option, file in (("--log", log), ("--picture", picture)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option}: {file.parent} is no folder; make it, or name another file", param=option)
    from moonpool.bench.chaos.run import Options
    from moonpool.bench.chaos.run import chaos as strike

    names = tuple(name.strip() for name in kinds.split(",") if name.strip())
    if kinds and not names:
        raise ConfigError(f"--kinds: {kinds!r} names none; `moonpool chaos --list` shows them", param="--kinds")
    figures = strike(Options(minutes, seed, names, model, registry, _pairs(settings), log, picture, keep))
    typer.echo(json.dumps(figures, indent=2) if as_json else _table(figures))
    if figures["failures"]:
        sys.exit(1)


def _pairs(settings: list[str] | None) -> tuple[tuple[str, str], ...]:
    from moonpool.core.errors import ConfigError

    pairs = []
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: {text!r} has no '='; write --set store.codecs=[]", param="--set")
        pairs.append((key.strip(), value))
    return tuple(pairs)


def _table(figures: dict[str, Any]) -> str:
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict):
            inner = "  ".join(f"{key} {one}" for key, one in value.items())
            lines.append(f"{name:<42} {inner or '-'}")
        elif isinstance(value, list):
            lines += [f"{name:<42} {value[0] if value else '-'}", *(f"{'':<42} {one}" for one in value[1:])]
        else:
            lines.append(f"{name:<42} {value}")
    return "\n".join(lines)
