"""``moonpool trace generate`` and ``moonpool replay``: load against a gateway, and its report."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import Running, find

trace = typer.Typer(help="Request traces in Mooncake's JSONL format.", no_args_is_help=True)


@trace.command("generate")
def generate(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; ending in .gz: packed.")],
    requests: Annotated[int | None, typer.Option("--requests", help="Rows.", show_default="40")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same trace.", show_default="1")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any value of the generator; may be repeated.")
    ] = None,
) -> None:
    """Write an agentic trace: sessions with tool loops and shared system prompts."""
    from moonpool.loadgen.commands import GenerateOptions
    from moonpool.loadgen.commands import generate as write

    chosen = _generator(settings or [], {"requests": requests, "seed": seed})
    facts = write(GenerateOptions(out, chosen))
    for name, value in dataclasses.asdict(facts).items():
        say(f"  {name:<20} {value:.4g}" if isinstance(value, float) else f"  {name:<20} {value}")
    print(out)


def _generator(settings: list[str], given: dict[str, int | None]) -> Any:
    from moonpool.core.errors import ConfigError
    from moonpool.loadgen.generate import GeneratorConfig

    kinds = {name: type(value) for name, value in dataclasses.asdict(GeneratorConfig()).items()}
    values: dict[str, float] = {name: value for name, value in given.items() if value is not None}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in kinds:
            raise ConfigError(f"--set: {name!r} is unknown; use one of {', '.join(kinds)}", param="--set")
        try:
            values[name] = kinds[name](value)
        except ValueError as e:
            raise ConfigError(f"--set: {text!r} is no {kinds[name].__name__}", param="--set") from e
    return GeneratorConfig(**values)  # type: ignore[arg-type]


def replay(
    trace_file: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="JSONL, perhaps .gz.", show_default=False)
    ] = None,
    generated: Annotated[bool, typer.Option("--generate", help="Replay an agentic trace made on the spot.")] = False,
    url: Annotated[str, typer.Option("--url", help="Base URL; default: the cluster that runs here.")] = "",
    ttft_target: Annotated[float | None, typer.Option("--ttft-target", metavar="MS", help="Target of every request.")] = None,
    tbt_target: Annotated[float | None, typer.Option("--tbt-target", metavar="MS", help="Target of every request.")] = None,
    send_targets: Annotated[bool, typer.Option(help="Send the targets along: the server may then refuse.")] = True,
    speed: Annotated[float, typer.Option("--speed", help="2 replays twice as fast.")] = 1.0,
    limit: Annotated[int, typer.Option("--limit", help="First rows only; 0: all.")] = 0,
    loops: Annotated[int, typer.Option("--loops", help="How often.")] = 1,
    trace_block_tokens: Annotated[
        int, typer.Option("--trace-block-tokens", help="Prompt tokens per hash id of the file.")
    ] = 512,
    block_tokens: Annotated[int, typer.Option("--block-tokens", help="Shrink to so many tokens per hash id; 0: keep.")] = 0,
    output_divisor: Annotated[int, typer.Option("--output-divisor", help="Divide output lengths by this.")] = 1,
    max_in_flight: Annotated[int, typer.Option("--max-in-flight", help="Cap, no longer an open loop; 0: none.")] = 0,
    adjust: Annotated[bool, typer.Option("--adjust", help="Repair and count odd rows instead of refusing the file.")] = False,
    salt: Annotated[int, typer.Option("--salt", help="Another salt, other prompts.")] = 0,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FOLDER", help="Write requests, summary, pictures.")
    ] = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Replay a trace open-loop and report TTFT, TBT and goodput."""
    from moonpool.loadgen.commands import ReplayOptions
    from moonpool.loadgen.commands import replay as run
    from moonpool.loadgen.plan import Scaling
    from moonpool.loadgen.report import in_words

    def running() -> Running:
        return find(name, config_file, settings)

    options = ReplayOptions(
        _trace(trace_file, generated, limit),
        url=(url or running().url).rstrip("/"),
        api_key=os.environ.get("MOONPOOL_API_KEY", ""),
        scaling=Scaling(speed=speed, block_tokens=block_tokens, output_divisor=output_divisor, limit=limit, loops=loops),
        trace_block_tokens=trace_block_tokens,
        adjust=adjust,
        salt=salt,
        ttft_target_ms=ttft_target,
        tbt_target_ms=tbt_target,
        send_targets=send_targets,
        max_in_flight=max_in_flight,
        report=report,
    )
    summary = run(options, cluster=None if url else lambda: _described(running()))
    print(json.dumps(dataclasses.asdict(summary), indent=2) if as_json else in_words(summary))
    if report is not None:
        say(f"report and pictures in {report}")
    if summary.interrupted:
        raise typer.Exit(130)


def _trace(file: Path | None, generated: bool, limit: int) -> Any:
    from moonpool.core.errors import ConfigError
    from moonpool.loadgen.generate import GeneratorConfig

    if (file is None) != generated:
        raise ConfigError("TRACE: give a file, or --generate instead of one", param="TRACE")
    return file if file is not None else GeneratorConfig(requests=limit or GeneratorConfig().requests)


def _described(running: Running) -> dict[str, Any]:
    """What the members of the local cluster say about carriers and transports."""
    import asyncio

    from moonpool.cluster.survey import survey

    return {"members": [answer.to_json() for answer in asyncio.run(survey(running.registry))]}
