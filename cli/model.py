"""``moonpool model fetch``: a model into the user's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.options import say

model = typer.Typer(help="Model directories.", no_args_is_help=True)


@model.command("fetch")
def fetch(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="Bundled name, Hugging Face id or directory.")] = "smollm2",
) -> None:
    """Fetch MODEL into the user's cache (if it is not there) and print its directory."""
    from moonpool.engine.checkpoint import default_cache
    from moonpool.engine.models import resolve_model

    print(resolve_model(path, default_cache(), say))
