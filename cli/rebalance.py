"""``moonpool rebalance``: the split of prefill and decode workers that the traffic wants, and the way there."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import find

if TYPE_CHECKING:
    from moonpool.core.membership import MemberChange

EXIT_UNFINISHED = 1  # a worker that was asked to switch did not, or not in time
LOOK_S = 0.3


def rebalance(
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    apply: Annotated[bool, typer.Option("--apply", help="Switch the workers that are proposed, and wait for them.")] = False,
    switch: Annotated[
        list[str] | None, typer.Option("--switch", metavar="WORKER=ROLE", help="This worker instead; may be repeated.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Whose workers, where the cluster serves several models.")] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for all of them.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Show which workers should change between prefill and decode, and why; ``--apply`` does it.

    A worker drains, leaves and comes back in the other role with its model still loaded. Exit code 0: nothing to do, or
    done; 1: a switch did not finish; 2: it could not be asked.
    """
    registry = find(name, config_file, settings).registry
    code = asyncio.run(_rebalance(registry, apply, _wanted(switch or []), timeout_s, as_json, model))
    sys.exit(code)


def _wanted(switches: list[str]) -> dict[str, str]:
    from moonpool.core.errors import ConfigError

    found = {}
    for text in switches:
        worker, equals, role = text.partition("=")
        if not equals or role not in ("prefill", "decode"):
            raise ConfigError(f"--switch: {text!r} is not WORKER=prefill or WORKER=decode", param="--switch")
        found[worker] = role
    return found


async def _rebalance(
    registry: str, apply: bool, wanted: dict[str, str], timeout_s: float, as_json: bool, model: str = ""
) -> int:
    from moonpool.cluster import survey
    from moonpool.core.errors import ConfigError

    before = {change.member.id: change for change in await survey.members(registry)}
    workers = sorted(c.member.id for c in before.values() if c.member.role.value in ("prefill", "decode"))
    unknown = [worker for worker in wanted if worker not in workers]
    if unknown and not apply:  # else the worker itself, or the conductor, says why not
        raise ConfigError(
            f"--switch: {unknown[0]!r} is no worker that switches; they are {', '.join(workers)}", param="--switch"
        )
    told = await survey.rebalance(registry, apply, wanted, model)
    if not as_json:
        _print(told, apply)
    code = await _follow(registry, told, before, timeout_s) if apply else 0
    if as_json:
        print(json.dumps({**told, "finished": code == 0}, indent=2))
    return code


async def _follow(registry: str, told: dict[str, Any], before: dict[Any, MemberChange], timeout_s: float) -> int:
    """Until every worker that was asked is back in its new role."""
    from moonpool.cluster import survey
    from moonpool.core.membership import Liveness

    code, roles = 0, {switch["worker"]: switch["role"] for switch in told["switches"]}
    for worker, why in told["begun"].items():
        if why:
            say(f"{worker} does not switch: {why.removeprefix(f'{worker}: ')}")
            code = EXIT_UNFINISHED
    open_, said = {worker for worker, why in told["begun"].items() if not why}, dict[str, str]()
    until = time.monotonic() + timeout_s
    while open_ and time.monotonic() < until:
        for change in await survey.members(registry):
            worker = change.member.id
            if worker not in open_:
                continue
            live, old = change.liveness is Liveness.LIVE, before.get(worker)
            newer = old is None or change.member.incarnation > old.member.incarnation
            stage = "drains" if live and not newer else "left, to come back"
            if live and newer and change.member.ready and change.member.role.value == roles[worker]:
                stage = f"is back as {roles[worker]}"
                open_.discard(worker)
            if said.get(worker) != stage:
                said[worker] = stage
                say(f"{worker} {stage}")
        await asyncio.sleep(LOOK_S)
    for worker in sorted(open_):
        say(f"{worker} has not come back as {roles[worker]} within {timeout_s:.0f} s (--timeout); `moonpool status` shows it")
    return EXIT_UNFINISHED if open_ else code


def _print(told: dict[str, Any], apply: bool) -> None:
    forecast, now, best = told["forecast"], told["now"], told["best"]
    print(
        f"forecast: {forecast['requests']:.2f} requests/s, {forecast['computed_tokens']:.0f} prompt tokens/s to compute "
        f"(of {forecast['prompt_tokens']:.0f}), {forecast['output_tokens']:.0f} output tokens/s: "
        f"{forecast['prefill_work']:.2f} prefill and {forecast['decode_work']:.2f} decode workers kept busy"
    )
    for load in told["loads"]:
        about = f"{load['wait_s']:.1f} s of work" if load["role"] == "prefill" else ""
        about = about or f"{load['batch']} sequences, {load['context_tokens']} tokens"
        print(f"  {load['worker']:<14} {load['role']:<8} {'on its way' if load['moving'] else about}")
    print(f"now:  {_split(now)}")
    print(f"best: {_split(best)}")
    print(f"size: {told['needed_prefill']} prefill and {told['needed_decode']} decode workers would do")
    for switch in told["switches"]:
        print(f"switch {switch['worker']} to {switch['role']}{'' if apply else ', with --apply'}")
    if not told["switches"]:
        print(f"nothing to switch: {told['held_back']}")


def _split(split: dict[str, Any]) -> str:
    pressures = f"pressure {split['prefill_pressure']:.2f} and {split['decode_pressure']:.2f}"
    return f"{split['prefill']} prefill, {split['decode']} decode; {pressures} (1: the targets are just met)"
