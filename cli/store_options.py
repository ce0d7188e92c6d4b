"""Options that several verbs of ``moonpool store`` share."""

from __future__ import annotations

from typing import Annotated

import typer

LONGEST_S = 86_400.0


def _seconds(value: float) -> float:
    from moonpool.core.errors import InvalidRequest

    if not 0 < value <= LONGEST_S:
        raise InvalidRequest(f"--seconds: {value:g} is no time limit; give more than 0, at most {LONGEST_S:g}", param="seconds")
    return value


Nodes = Annotated[list[str] | None, typer.Option("--node", help="Node id; may be repeated. Default: all live ones.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--keys", metavar="HEX[,HEX...]|@FILE", help="Block keys in order; may be repeated. A file has one a line."),
]
Prompt = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT|@FILE", help="The whole blocks of this completion prompt.")
]
Chat = Annotated[bool, typer.Option("--chat", help="--prompt is one user message of a chat.")]
Codec = Annotated[
    str, typer.Option("--codec", help="int8 or fp8; store.codecs must list it, and store.lossy_for the tenant or model.")
]
Tenant = Annotated[str, typer.Option("--tenant", help="Tenant name.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask on a terminal.")]
From = Annotated[str, typer.Option("--from", help="Node that has the blocks.")]
To = Annotated[str, typer.Option("--to", help="Node that shall have them.")]
Seconds = Annotated[float, typer.Option("--seconds", help="Time limit of the copy.", callback=_seconds)]
