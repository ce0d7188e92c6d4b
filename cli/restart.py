"""``moonpool restart``: the processes of a running cluster, one at a time, while the others serve."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import find

if TYPE_CHECKING:
    from moonpool.cli.running import Running
    from moonpool.core.membership import Member

EXIT_UNFINISHED = 1  # a process did not come back


def restart(
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    role: Annotated[
        str, typer.Option("--role", help="Only these: store, prefill, decode, both, conductor or gateway.", show_default=False)
    ] = "",
    member: Annotated[str, typer.Option("--member", metavar="ID", help="Only this process.", show_default=False)] = "",
    rolling: Annotated[bool, typer.Option("--rolling", help="One at a time; needed where there is more than one.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where nobody serves meanwhile.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for one process to be back.")] = 180.0,
    as_json: AsJson = False,
) -> None:
    """Restart processes of a running cluster without losing a request.

    Each one leaves in order (finishes or hands over what it has, a store node moves out what only it holds), is started anew
    by its launcher, and serves again before the next one leaves. Exit code 0: all are back; 1: one is not; 2: refused.
    """
    running = find(name, config_file, settings)
    sys.exit(asyncio.run(_restart(running, role, member, rolling, force, timeout_s, as_json)))


async def _restart(
    running: Running, role: str, member: str, rolling: bool, force: bool, timeout_s: float, as_json: bool
) -> int:
    from moonpool.cluster.restart import live_members
    from moonpool.core.errors import ConfigError

    registry = running.registry
    chosen = _chosen(await live_members(registry), role, member)
    if len(chosen) > 1 and not rolling:
        names = ", ".join(m.id for m in chosen)
        raise ConfigError(
            f"--rolling: give it to restart {names} one after the other, or choose one by --member", param="rolling"
        )
    if not force:
        _require_others(await live_members(registry), chosen)
    trust = running.local.trust if running.local else ""
    told = await _roll(registry, chosen, force, timeout_s, trust)
    if as_json:
        print(json.dumps(told, indent=2))
    return 0 if told["finished"] else EXIT_UNFINISHED


def _chosen(live: list[Member], role: str, member: str) -> list[Member]:
    from moonpool.cluster.rolling import in_order
    from moonpool.core.errors import ConfigError
    from moonpool.core.ids import Role

    if role and role not in [r.value for r in Role]:
        raise ConfigError(f"--role: {role!r} is unknown; use one of {', '.join(r.value for r in Role)}", param="--role")
    if role and member:
        raise ConfigError("--member: give it or --role, not both", param="--member")
    chosen = [m for m in live if (not role or m.role.value == role) and (not member or m.id == member)]
    if not chosen:
        there = ", ".join(sorted(m.id for m in live)) or "nobody"
        raise ConfigError(f"{'--member' if member else '--role'}: {member or role!r} is not live; these are: {there}")
    return in_order(chosen)


def _require_others(live: list[Member], chosen: list[Member]) -> None:
    from moonpool.cluster.rolling import gap
    from moonpool.core.errors import ConfigError

    for one in chosen:
        if why := gap(live, one.id):
            raise ConfigError(f"{one.id}: {why}; nothing was restarted. --force restarts it all the same", param="--force")


async def _roll(registry: str, chosen: list[Member], force: bool, timeout_s: float, trust: str) -> dict[str, Any]:
    from moonpool.cluster.restart import live_members, restart
    from moonpool.cluster.rolling import gap
    from moonpool.core.errors import MoonpoolError

    told: dict[str, Any] = {"restarted": [], "left_out": [m.id for m in chosen], "finished": False, "trouble": ""}
    for number, one in enumerate(chosen, start=1):
        live = {m.id: m for m in await live_members(registry)}
        try:
            if one.id not in live:
                say(f"{one.id} is not live any more: left out")
                continue
            if not force and (why := gap(list(live.values()), one.id)):
                told["trouble"] = f"{one.id}: {why}"
                break
            say(f"({number}/{len(chosen)}) {one.id} is asked to restart")
            done = await restart(registry, live[one.id], timeout_s, say, trust)
        except MoonpoolError as e:
            told["trouble"] = e.message
            break
        say(f"{one.id} serves again after {done.seconds:.1f} s")
        told["restarted"].append(asdict(done))
        told["left_out"].remove(one.id)
    told["finished"] = not told["trouble"]
    if told["trouble"]:
        say(f"stopped: {told['trouble']}; not restarted: {', '.join(told['left_out'])}")
    return told
