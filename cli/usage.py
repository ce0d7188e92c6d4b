"""``moonpool usage``: what tenants took of which model, from a gateway's usage log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import AsJson, ConfigFile, Settings, read_config, say

if TYPE_CHECKING:
    from moonpool.cluster.usage_report import Report


def usage(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A usage log; default: gateway.usage_log.", show_default=False)
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="WHAT", help="tenant, model, day, endpoint, outcome or gateway; may be repeated."),
    ] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Sum a usage log, and the full ones beside it, by tenant or by what ``--by`` names."""
    from moonpool.cluster.usage_report import GROUPS, lines_of, report
    from moonpool.core.errors import ConfigError

    groups = list(dict.fromkeys(by or ["tenant"]))
    if unknown := next((name for name in groups if name not in GROUPS), None):
        raise ConfigError(f"--by: {unknown!r} is unknown; use {', '.join(GROUPS)}", param="--by")
    found = report(lines_of(file or _configured(config_file, settings)), groups)
    if as_json:
        rows = [{**dict(zip(found.by, names, strict=True)), **one.to_json()} for names, one in found.groups.items()]
        print(
            json.dumps({"by": groups, "groups": rows, "total": found.total.to_json(), "unreadable": found.unreadable}, indent=2)
        )
    else:
        _print(found)


def _configured(config_file: Path | None, settings: list[str] | None) -> Path:
    from moonpool.core.errors import ConfigError

    config, _ = read_config(config_file, settings)
    if not config.gateway.usage_log:
        raise ConfigError("FILE: missing, and gateway.usage_log names none; give the file", param="FILE")
    return Path(config.gateway.usage_log)


_COLUMNS = (
    "requests",
    "answered",
    "refused",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "attempts",
    "mean_ttft_ms",
)


def _print(found: Report) -> None:
    rows = [(" ".join(names) or "-", one.to_json()) for names, one in found.groups.items()]
    rows.append(("total", found.total.to_json()))
    width = max(len(name) for name, _ in [(" ".join(found.by), {}), *rows])
    print(f"{' '.join(found.by):<{width}}  " + "  ".join(f"{name:>{len(name)}}" for name in _COLUMNS))
    for name, values in rows:
        shown = ("-" if values[column] is None else f"{values[column]:.0f}" for column in _COLUMNS)
        print(f"{name:<{width}}  " + "  ".join(f"{text:>{len(column)}}" for text, column in zip(shown, _COLUMNS, strict=True)))
    if found.unreadable:
        say(f"{found.unreadable} lines could not be read and are left out")
