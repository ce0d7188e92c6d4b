"""``moonpool VERB``. Verbs import what is heavy inside themselves, so that help and errors come at once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from moonpool.cli import (
    bench,
    certs,
    chaos,
    chat,
    config,
    doctor,
    down,
    explain,
    keys,
    load,
    model,
    plan,
    rebalance,
    restart,
    run_role,
    simulate,
    status,
    store,
    top,
    up,
    usage,
    warm,
)
from moonpool.cli.job import exit_code_told
from moonpool.core.errors import MoonpoolError


@dataclass(slots=True)
class Choices:
    debug: bool = False


def build(choices: Choices) -> typer.Typer:
    app = typer.Typer(
        name="moonpool",
        help="A prefill/decode-disaggregated LLM serving cluster with one pooled KV store.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        add_completion=False,
    )

    @app.callback()
    def root(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False) -> None:
        choices.debug = debug

    app.command("up")(up.up)
    app.command("down")(down.down)
    app.command("status")(status.status)
    app.command("top")(top.top)
    app.command("chat")(chat.chat)
    app.command("explain")(explain.explain)
    app.command("usage")(usage.usage)
    app.command("warm")(warm.warm)
    app.command("rebalance")(rebalance.rebalance)
    app.command("restart")(restart.restart)
    app.command("replay")(load.replay)
    app.command("simulate")(simulate.simulate)
    app.add_typer(load.trace, name="trace")
    app.add_typer(store.store, name="store")
    app.add_typer(keys.keys, name="keys")
    app.add_typer(bench.bench, name="bench")
    app.command("chaos")(chaos.chaos)
    app.command("doctor")(doctor.doctor)
    app.command("plan")(plan.plan)
    app.command("run")(run_role.run)
    app.add_typer(model.model, name="model")
    app.add_typer(certs.certs, name="certs")
    app.add_typer(config.config, name="config")
    app.command("version")(version)
    return app


def version() -> None:
    """Print the version."""
    from moonpool import __version__

    print(__version__)


def run() -> None:
    """The console script. Errors we raise on purpose are one line and exit code 2."""
    choices = Choices()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would write a line for every connection that speaks no TLS
    with exit_code_told():
        try:
            build(choices)()
        except MoonpoolError as e:
            if choices.debug:
                raise
            print(f"moonpool: {e.message}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    run()
