"""``moonpool bench NAME``: every claim about performance as a command. JSON on standard output, progress on standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli import bench_serving
from moonpool.cli.bench_answers import chosen, pairs, print_figures
from moonpool.cli.options import AsJson, Settings

DYNAMO_PYTHON = "An interpreter that has ai-dynamo-runtime, to compare with."
bench = typer.Typer(help="Measurements; each starts what it measures.", no_args_is_help=True)


@bench.callback()
def logs_apart() -> None:
    """Standard output is for figures."""
    import structlog

    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))  # whatever it is by then


for _verb in (bench_serving.serve, bench_serving.replay, bench_serving.scale, bench_serving.path, bench_serving.pipeline):
    bench.command(_verb.__name__)(_verb)


@bench.command("handoff")
def handoff(
    carrier: Annotated[str | None, typer.Option("--carrier", help="tcp, ucx, ucxx or segment.")] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Samples per figure.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """How much of the hand-off shows after the last layer's compute, and what it puts on the wire."""
    from moonpool.bench.handoff import handoff as measure

    print_figures(measure(**chosen({"carrier": carrier, "repeats": repeats, "model": model})), as_json)


@bench.command("carrier")
def carrier(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="tcp, ucx, ucxx or segment; all of them if left out.")
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", help="Turns per figure.")] = None,
    peer_python: Annotated[str | None, typer.Option("--peer-python", help="An interpreter that has NIXL.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bytes between two processes by each carrier, against a bare socket."""
    from moonpool.bench.carrier import carrier as measure

    print_figures(measure(**chosen({"only": only, "repeats": repeats, "peer_python": peer_python})), as_json)


@bench.command("store")
def store(
    repeats: Annotated[int | None, typer.Option("--repeats", help="Turns per figure.")] = None,
    peer_python: Annotated[
        str | None, typer.Option("--peer-python", metavar="PATH", help="An interpreter that has other stores to compare with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Values put into and got from a store node in another process, against plain copies, in one run."""
    from moonpool.bench.store import store as measure

    print_figures(measure(**chosen({"repeats": repeats, "peer_python": peer_python})), as_json)


@bench.command("index")
def index(
    entries: Annotated[int | None, typer.Option("--entries", min=10_000, help="Blocks in the index.")] = None,
    peer_python: Annotated[str | None, typer.Option("--peer-python", metavar="PATH", help=DYNAMO_PYTHON)] = None,
    as_json: AsJson = False,
) -> None:
    """The conductor's index of who holds which block: matching, following events, memory."""
    from moonpool.bench.index import index as measure

    print_figures(measure(**chosen({"entries": entries, "peer_python": peer_python})), as_json)


@bench.command("hash")
def hash_(
    peer_python: Annotated[str | None, typer.Option("--peer-python", metavar="PATH", help=DYNAMO_PYTHON)] = None,
    as_json: AsJson = False,
) -> None:
    """A prompt's token ids into block keys."""
    from moonpool.bench.hash import hash_blocks as measure

    print_figures(measure(**chosen({"peer_python": peer_python})), as_json)


@bench.command("placement")
def placement(
    policy: Annotated[str | None, typer.Option("--policy", help="Placement policy.")] = None,
    admission: Annotated[str | None, typer.Option("--admission", help="Admission policy.")] = None,
    as_json: AsJson = False,
) -> None:
    """How long the conductor takes to decide about one request, at 64 and at 512 nodes."""
    from moonpool.bench.placement import placement as measure

    print_figures(measure(**chosen({"policy": policy, "admission": admission})), as_json)


@bench.command("fidelity")
def fidelity(
    requests: Annotated[int | None, typer.Option("--requests", help="Of each of the two traces.")] = None,
    slower: Annotated[float | None, typer.Option("--slower", help="Stretch their times by so much.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Placement policy of both sides.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder for a picture of both.")] = None,
    as_json: AsJson = False,
) -> None:
    """The simulator against a real local cluster: fitted on one trace, compared on another."""
    from moonpool.bench.fidelity import FidelityOptions
    from moonpool.bench.fidelity import fidelity as measure

    given = {"requests": requests, "slower": slower, "policy": policy, "model": model, "out": out}
    print_figures(measure(FidelityOptions(**chosen(given))), as_json)


@bench.command("overload")
def overload(
    times: Annotated[float | None, typer.Option("--times", help="Of the capacity that is measured first.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Of overload.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    launcher: Annotated[str | None, typer.Option("--launcher", help="ray or process.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """A local cluster under several times its capacity: who is let in meets its targets, who is not hears so at once."""
    from moonpool.bench.overload import OverloadOptions
    from moonpool.bench.overload import overload as measure

    given = {"times": times, "seconds": seconds, "model": model, "launcher": launcher, "settings": pairs(settings)}
    print_figures(measure(OverloadOptions(**chosen(given))), as_json)


@bench.command("fairness")
def fairness(
    times: Annotated[int | None, typer.Option("--times", help="The flood's requests on the way.")] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Of the quiet tenant, in each run.")] = None,
    live: Annotated[bool, typer.Option("--live/--simulated", help="Also on a cluster started here.")] = True,
    as_json: AsJson = False,
) -> None:
    """One tenant floods, another one asks now and then: its time to first token, against its own without the flood."""
    from moonpool.bench.fairness import FairnessOptions
    from moonpool.bench.fairness import fairness as measure

    print_figures(measure(FairnessOptions(**chosen({"times": times, "requests": requests, "live": live}))), as_json)


@bench.command("sharing")
def sharing(
    way: Annotated[
        list[str] | None, typer.Option("--way", help="both, both_whole, split or split_turns; all of them if left out.")
    ] = None,
    answers: Annotated[int | None, typer.Option("--answers", help="That stream all the time.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", help="Long ones in each round.")] = None,
    gap_ms: Annotated[float | None, typer.Option("--gap-ms", help="Between two ids, that the answers can bear.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Turns of the ways.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="Backend: auto, compiled, fused or torch.")] = None,
    as_json: AsJson = False,
) -> None:
    """Long prompts beside running answers on this machine: one worker, or two that share its cores."""
    from moonpool.bench.sharing import SharingOptions
    from moonpool.bench.sharing import sharing as measure

    given = {
        "ways": tuple(way) if way else None, "answers": answers, "prompts": prompts, "gap_ms": gap_ms, "rounds": rounds,
        "model": model, "engine": engine,
    }  # fmt: skip
    print_figures(measure(SharingOptions(**chosen(given))), as_json)


@bench.command("between")
def between(
    carrier: Annotated[str | None, typer.Option("--carrier", help="auto, tcp, ucx or ucxx.")] = None,
    total: Annotated[str | None, typer.Option("--bytes", metavar="SIZE", help="The working set, e.g. 2GiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """A working set from one store node to another, every byte checked."""
    from moonpool.bench.between import BetweenOptions
    from moonpool.bench.between import between as measure
    from moonpool.cluster.configure import read_size

    given = {"carrier": carrier, "total_bytes": None if total is None else read_size(total, "--bytes")}
    print_figures(measure(BetweenOptions(**chosen(given))), as_json)


@bench.command("tiers")
def tiers(
    repeats: Annotated[int | None, typer.Option("--repeats", help="Samples per figure.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    path: Annotated[str | None, typer.Option("--path", help="Folder on the disk to measure.")] = None,
    as_json: AsJson = False,
) -> None:
    """A prompt again from device pages, DRAM and SSD, against computing it."""
    from moonpool.bench.tiers import TierOptions
    from moonpool.bench.tiers import tiers as measure

    print_figures(measure(TierOptions(**chosen({"repeats": repeats, "model": model, "path": path}))), as_json)


@bench.command("evict")
def evict(
    trace: Annotated[str, typer.Option("--trace", help="Request trace, Mooncake JSONL, plain or gzip.")],
    policy: Annotated[str | None, typer.Option("--policy", help="One policy; all of them if left out.")] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="Only the first so many.")] = None,
    as_json: AsJson = False,
) -> None:
    """Token hit rates of the eviction policies on a request trace."""
    from moonpool.bench.evict import evict as measure

    print_figures(measure(trace=trace, **chosen({"policies": policy and (policy,), "requests": requests})), as_json)


@bench.command("alloc")
def alloc(
    pool_gib: Annotated[int | None, typer.Option("--pool-gib", min=4, help="Size of the pool; no memory is taken.")] = None,
    bursts: Annotated[int | None, typer.Option("--bursts", min=1, help="Bursts measured.")] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Eviction policy.")] = None,
    as_json: AsJson = False,
) -> None:
    """A full pool's book-keeping: reserve, seal and evict in bursts, two block sizes in a swinging mix."""
    from moonpool.bench.alloc import alloc as measure

    print_figures(measure(**chosen({"pool_gib": pool_gib, "bursts": bursts, "policy": policy})), as_json)


@bench.command("gpu")
def gpu(
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Turns per figure; the best one counts.")] = None,
    as_json: AsJson = False,
) -> None:
    """The kernels of a worker on a GPU, against copies and products of the same device. Ends with 1 where there is none."""
    from moonpool.bench.gpu import GpuOptions, trouble
    from moonpool.bench.gpu import gpu as measure

    reason = trouble()
    if reason is not None:
        print_figures({"measured": False, "reason": reason}, as_json)
        raise typer.Exit(1)
    print_figures(measure(GpuOptions(**chosen({"rounds": rounds}))), as_json)


@bench.command("attention")
def attention(
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads that compute.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Samples per figure; the best counts.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attention over pages against what the machine reads and multiplies, for each backend that runs here."""
    from moonpool.bench.attention import AttentionOptions
    from moonpool.bench.attention import attention as measure

    print_figures(measure(AttentionOptions(**chosen({"threads": threads, "rounds": rounds}))), as_json)


@bench.command("codecs")
def codecs(
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="File to be read; default: this program's own sources.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the codecs of `moonpool store compress` cost on a real model's KV: size, error, speed, likelihood."""
    from moonpool.bench.codecs import codecs as measure

    print_figures(measure(**chosen({"model": model, "text": text})), as_json)


@bench.command("ssd")
def ssd(
    path: Annotated[str, typer.Option("--path", help="Folder on the disk to measure.")],
    seconds: Annotated[float | None, typer.Option("--seconds", help="Time of measuring, all turns together.")] = None,
    as_json: AsJson = False,
) -> None:
    """The SSD tier against fio: 1 MB blocks, direct I/O, taking turns."""
    from moonpool.bench.ssd import SsdOptions
    from moonpool.bench.ssd import ssd as measure

    print_figures(measure(SsdOptions(**chosen({"path": path, "seconds": seconds}))), as_json)


@bench.command("security")
def security(
    path: Annotated[str | None, typer.Option("--path", help="Folder on the disk to measure.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or directory.")] = None,
    cluster_rounds: Annotated[
        int | None, typer.Option("--cluster-rounds", min=0, help="Clusters started with each setting; 0: no TTFT.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """TTFT and GB/s with and without mutual TLS and KV encryption, as ratios, beside what one core can encrypt."""
    from moonpool.bench.security import SecurityOptions
    from moonpool.bench.security import security as measure

    given = {"path": path, "model": model, "cluster_rounds": cluster_rounds}
    print_figures(measure(SecurityOptions(**chosen(given))), as_json)


@bench.command("crash")
def crash(
    kills: Annotated[int, typer.Option("--kills", min=1, help="Kills per operation.")] = 40,
    only: Annotated[list[str] | None, typer.Option("--only", help="Operation; all of them if left out.")] = None,
    path: Annotated[Path | None, typer.Option("--path", help="Folder to work in; default: the temporary folder.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the instants.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Kill -9 at random instants of each operation: wrong bytes, missing blocks and lost space afterwards."""
    from moonpool.bench.crash import crash as measure
    from moonpool.bench.crash_moves import move_operations
    from moonpool.bench.crash_ssd import ssd_operations

    every = [*move_operations(), *ssd_operations()]
    chosen = [operation for operation in every if only is None or operation.name in only]
    figures = measure(chosen, kills=kills, path=path, seed=seed, say=lambda line: typer.echo(line, err=True))
    print_figures(figures, as_json)
    if figures["faults"]:
        raise typer.Exit(1)


@bench.command("cancels")
def cancels(
    count: Annotated[int | None, typer.Option("--count", help="Cancellations, over all windows.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of requests, instants and pauses.")] = None,
    as_json: AsJson = False,
) -> None:
    """Random cancellations in every window of a request's life: nothing may stay held, no other answer may change."""
    from moonpool.bench.cancels.run import CancelsOptions
    from moonpool.bench.cancels.run import cancels as measure

    figures = measure(CancelsOptions(**chosen({"count": count, "seed": seed})))
    print_figures(figures, as_json)
    if figures["faults"]:
        raise typer.Exit(1)
