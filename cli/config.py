"""``moonpool config show``: every value and where it came from."""

from __future__ import annotations

import json

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
        line = f"{key.split('.')[1]} = {_toml(value)}"
        print(f"{line:<48} # {origin}")


def _toml(value: str) -> str:
    """JSON text as TOML: they differ, for our values, in tables only."""
    read = json.loads(value)
    if isinstance(read, list):
        tables = ("{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in table.items()) + " }" for table in read)
        return f"[{', '.join(tables)}]"
    return value
