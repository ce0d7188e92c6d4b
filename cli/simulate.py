"""``moonpool simulate``: a trace on a cluster that does not exist."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, named, say
from moonpool.cli.simulate_search import search as search_split
from moonpool.cli.simulate_suite import Compared, compare_policies, run_suite

if TYPE_CHECKING:
    from moonpool.sim.cluster import SimCluster

TELL_EVERY_S = 1.0


def simulate(
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="JSONL, perhaps .gz.", show_default=False)
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", help="TOML file, or one that comes along, by name.")] = "llama70b_8p8d",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Overrule a value of the cluster; may be repeated.")
    ] = None,
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Prefill nodes; 0: as the cluster says.")] = 0,
    decode: Annotated[int, typer.Option("--decode", min=0, help="Decode nodes; 0: as the cluster says.")] = 0,
    policy: Annotated[str, typer.Option("--policy", help="Placement policy; NAME or NAME,SETTING=VALUE,...")] = "moonpool",
    admission: Annotated[str, typer.Option("--admission", help="Admission; NAME or NAME,SETTING=VALUE,...")] = "none",
    speed: Annotated[float, typer.Option("--speed", help="2 replays twice as fast.")] = 1.0,
    bursts: Annotated[
        str, typer.Option("--bursts", help="released: as the trace says; spread: evenly to the next timestamp.")
    ] = "released",
    limit: Annotated[int, typer.Option("--limit", min=0, help="First rows only; 0: all.")] = 0,
    adjust: Annotated[bool, typer.Option("--adjust", help="Repair and count odd rows instead of refusing the file.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the cluster's noise and of policies that draw.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write figures, requests, pictures.")
    ] = None,
    compare: Annotated[
        str, typer.Option("--compare", metavar="P1,P2,...", help="Policies side by side; settings follow their policy's name.")
    ] = "",
    roles: Annotated[
        str, typer.Option("--roles", help="fixed, or auto: they follow the traffic; auto,SETTING=VALUE,...")
    ] = "fixed",
    search: Annotated[bool, typer.Option("--search", help="The fewest nodes that keep --share inside the targets.")] = False,
    share: Annotated[float, typer.Option("--share", help="--search: of all requests.")] = 0.98,
    nodes: Annotated[
        int, typer.Option("--nodes", min=0, help="--search: the best split of so many instead; 0: as few as do.")
    ] = 0,
    suite: Annotated[str, typer.Option("--suite", help="paper: the whole comparison with published figures.")] = "",
    traces: Annotated[
        Path | None, typer.Option("--traces", metavar="FOLDER", help="--suite: the public traces.", show_default=False)
    ] = None,
    subset: Annotated[
        str, typer.Option("--subset", help="--suite: all, ci (minutes) or tuning (the constants' grid).")
    ] = "all",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROW,...", help="--suite: rows by name or pattern; the rest is missed."),
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="--suite: runs at a time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Replay a trace on a simulated cluster, with the production conductor, queues, batchers and pools."""
    from moonpool.core.errors import ConfigError

    if suite:
        run_suite(suite, traces=traces, subset=subset, only=only or (), folder=output, processes=processes, as_json=as_json)
        return
    from moonpool.loadgen.trace import read_trace
    from moonpool.scheduler.admission.make import make_admission
    from moonpool.scheduler.policies.make import make_policy
    from moonpool.sim.report import in_json, in_words, write_outcome
    from moonpool.sim.run import simulate as run
    from moonpool.sim.search import Goal, Makers, planner_of

    if only or traces is not None:
        raise ConfigError("--only, --traces: of a suite; add --suite paper, or leave them out", param="--suite")
    if nodes and not search:
        raise ConfigError("--nodes: of a search; add --search, or give --prefill and --decode", param="--nodes")
    if trace is None:
        raise ConfigError("--trace: give a JSONL trace, perhaps .gz", param="--trace")
    if bursts not in ("released", "spread"):
        raise ConfigError(f"--bursts: {bursts!r} is neither released nor spread", param="--bursts")
    machines = _cluster(cluster, settings or [], {"prefill": prefill, "decode": decode})
    read = read_trace(trace, block_tokens=machines.model.block_tokens, adjust=adjust)
    if read.notes.adjusted:
        say(f"{trace}: " + ", ".join(f"{name} {count}" for name, count in asdict(read.notes).items() if count))
    if compare:
        if search or roles != "fixed":
            raise ConfigError("--compare: takes neither --search nor --roles; leave one out", param="--compare")
        wanted = Compared(
            read.rows[: limit or None], machines, named(admission, "--admission"), speed, bursts == "spread", seed
        )
        compare_policies(compare, wanted, folder=output, as_json=as_json)
        return
    policy_name, policy_settings = named(policy, "--policy")
    admission_name, admission_settings = named(admission, "--admission")
    planned, planner_settings = named(roles, "--roles")
    makers = Makers(
        lambda: make_policy(policy_name, policy_settings),
        lambda: make_admission(admission_name, admission_settings),
        lambda: planner_of(planned, planner_settings, machines.targets),
    )
    if search:
        goal = Goal(share, speed, "spread" if bursts == "spread" else "released")
        search_split(read.rows[: limit or None], machines, makers, goal, nodes=nodes, as_json=as_json)
        return
    began = time.monotonic()
    outcome = run(
        read.rows[: limit or None],
        machines,
        policy=makers.policy(),
        admission=makers.admission(),
        planner=makers.planner(),
        speed=speed,
        bursts="spread" if bursts == "spread" else "released",
        seed=seed,
        on_progress=_progress(),
    )
    used: dict[str, Any] = {
        "trace": trace.name,
        "cluster": machines.model_dump(mode="json"),
        "policy": {"name": policy_name, **policy_settings},
        "admission": {"name": admission_name, **admission_settings},
        "roles": {"name": planned, **planner_settings},
        "speed": speed,
        "bursts": bursts,
        "limit": limit,
        "seed": seed,
        "wall_s": round(time.monotonic() - began, 3),
    }
    for path in write_outcome(output, outcome, used) if output is not None else ():
        say(f"wrote {path}")
    print(json.dumps(in_json(outcome, used), indent=2) if as_json else in_words(outcome))


def _cluster(name: str, settings: list[str], counts: dict[str, int]) -> SimCluster:
    from moonpool.core.errors import ConfigError
    from moonpool.sim.cluster import read_cluster

    values: dict[str, str] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set: {text!r} has no '='; write --set link.bytes_per_s=3e9", param="--set")
        values[key.strip()] = value.strip()
    machines = read_cluster(name, values)
    wanted = {role: count for role, count in counts.items() if count}
    for role in wanted:
        groups = sum(group.role == role for group in machines.groups)
        if groups != 1:
            raise ConfigError(f"--{role}: {name} has {groups} groups of {role} nodes; edit its counts there", param=f"--{role}")
    return machines.resized(**wanted) if wanted else machines


def _progress() -> Callable[[int, int], None]:
    """Tells a terminal how many requests have ended, about once a second."""
    told = time.monotonic()

    def tell(ended: int, of: int) -> None:
        nonlocal told
        now = time.monotonic()
        if sys.stderr.isatty() and (now - told >= TELL_EVERY_S or ended == of):
            told = now
            print(f"\r{ended} of {of} requests", end="\n" if ended == of else "", file=sys.stderr, flush=True)

    return tell
