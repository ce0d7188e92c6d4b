"""``moonpool config show``: every value and where it came from."""

from __future__ import annotations

import json
import re

import typer

from moonpool.cli.options import AsJson, ConfigFile, Settings, read_config

config = typer.Typer(help="Configuration: file < environment < command line.", no_args_is_help=True)


@config.command("show")
def show(config_file: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Print every value with its origin, as a TOML file that may be given back with --config."""
    from moonpool.cluster.configure import describe

    values, origins = read_config(config_file, settings)
    rows = list(describe(values, origins))
    if as_json:
        print(json.dumps({key: {"value": json.loads(value), "origin": origin} for key, value, origin in rows}, indent=2))
        return
    section = ""
    for key, value, origin in rows:
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            print(f"\n[{section}]")
        line = f"{key.split('.')[1]} = {_toml(json.loads(value))}"
        print(f"{line:<48} # {origin}")


def _toml(value: object) -> str:
    """Numbers, words and truth values read alike in JSON and TOML; tables do not."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items()) + " }" if value else "{}"
    return json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)
