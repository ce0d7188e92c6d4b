"""Options that several verbs share, and how they become a configuration."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moonpool.core.config import Config

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file with sections as `config show` prints them.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrule one value; may be repeated.")
]
ClusterName = Annotated[str | None, typer.Option("--name", help="Cluster name (cluster.name).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def read_config(
    file: Path | None, settings: list[str] | None, chosen: dict[str, str | None] | None = None
) -> tuple[Config, dict[str, str]]:
    """File < environment < ``--set`` < the verb's own options (``chosen``: those given). Returns values and their origins."""
    from moonpool.cluster.configure import load_config
    from moonpool.cluster.spec import with_absolute_paths
    from moonpool.core.errors import ConfigError

    overrides: dict[str, str] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: {text!r} has no '='; write --set gateway.port=8001", param="--set")
        overrides[key.strip()] = value
    overrides.update({key: value for key, value in (chosen or {}).items() if value is not None})
    config, origins = load_config(file, os.environ, overrides)
    return with_absolute_paths(config, Path.home()), origins


def verb(word: str, cluster: str) -> str:
    """The command line of ``word`` for the cluster named ``cluster``, for hints."""
    return f"`moonpool {word}`" if cluster == "moonpool" else f"`moonpool {word} --name {cluster}`"


def say(line: str) -> None:
    """Progress goes to standard error, so that standard output stays the answer."""
    print(line, file=sys.stderr, flush=True)


def named(text: str, option: str) -> tuple[str, dict[str, float]]:
    """A name and its settings: ``moonpool,ageing=0.1``."""
    from moonpool.core.errors import ConfigError

    name, *rest = text.split(",")
    settings: dict[str, float] = {}
    for part in rest:
        key, _, value = part.partition("=")
        try:
            settings[key.strip()] = float(value)
        except ValueError as e:
            raise ConfigError(f"{option}: {part!r} is no SETTING=NUMBER", param=option) from e
    return name.strip(), settings
