"""A cluster of dummy roles on Ray, driven in a process of its own: prints what happened as JSON.

``python ray_house.py STATE_DIR`` kills one actor with SIGKILL, waits for its next life, and stops everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from dummy_role import make

from moonpool.cluster.launch.death_watch import DeathWatch
from moonpool.cluster.launch.ray_launcher import RayLauncher
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.membership import Membership
from moonpool.cluster.registry import Registry
from moonpool.cluster.spec import RoleSpec, with_absolute_paths
from moonpool.core.config import ClusterConfig, Config
from moonpool.core.errors import MoonpoolError
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Member
from moonpool.wire import pb
from moonpool.wire.channels import dial

NAMES = {MemberId("conductor-0"): NodeId("a"), MemberId("conductor-1"): NodeId("b")}


async def main(folder: Path) -> dict[str, Any]:
    config = with_absolute_paths(Config(cluster=ClusterConfig(name="rayhouse", state_dir=str(folder))), folder)
    state, failures = StateDir.create(folder), []
    launcher = RayLauncher(config, state, lambda line: None, lambda member, why: failures.append(why), make=make)
    await launcher.open()
    registry = Registry(config.timing)
    address = await registry.start("127.0.0.1")
    peers = Membership(address, config.timing, lambda why, replaced: None)
    deaths = DeathWatch(peers, [NodeId("a"), NodeId("b")])
    for name, node in NAMES.items():
        await launcher.start(RoleSpec(name, Role.CONDUCTOR, node, config, address, Path("none")))
    first = await both(peers, {})
    os.kill(first[MemberId("conductor-0")].pid, signal.SIGKILL)
    second = await both(peers, {MemberId("conductor-0"): first[MemberId("conductor-0")].pid})
    await restart(second[MemberId("conductor-1")])
    third = await both(peers, {MemberId("conductor-1"): second[MemberId("conductor-1")].pid})
    actors = sorted(actor_names())
    await launcher.stop()
    deaths.close()
    await peers.leave()
    await registry.close()
    return {
        "failures": failures,
        "actors": actors,
        "lives": {name: [first[name].incarnation, second[name].incarnation] for name in NAMES},
        "asked": [member[MemberId("conductor-1")].incarnation for member in (second, third)],
        "left": [p.name() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE],
        "recorded": list(state.recorded()),
        "scratch": [str(p) for p in (folder / "scratch",) if p.is_symlink()],
    }


async def restart(member: Member) -> None:
    async with dial(member.address) as channel:
        await pb.admin_rpc.AdminStub(channel).Restart(pb.types.Empty(), timeout=10.0)


async def both(peers: Membership, old: dict[MemberId, int]) -> dict[MemberId, Member]:
    def found() -> dict[MemberId, Member]:
        return {m.id: m for m in peers.live(Role.CONDUCTOR) if m.pid != old.get(m.id)}

    await peers.until(lambda: len(found()) == len(NAMES), 60.0, "life of both")
    return found()


def actor_names() -> list[str]:
    from ray.util import list_named_actors

    return [str(entry["name"]) for entry in list_named_actors(all_namespaces=True)]


async def short_of_cpus(folder: Path) -> dict[str, Any]:
    config = with_absolute_paths(Config(cluster=ClusterConfig(name="rayshort", state_dir=str(folder))), folder)
    launcher = RayLauncher(config, StateDir.create(folder), lambda line: None, lambda member, why: None, cpus=1, make=make)
    began = time.monotonic()
    try:
        await launcher.open()
    except MoonpoolError as e:
        return {"error": f"{type(e).__name__}: {e}", "seconds": time.monotonic() - began}
    finally:
        await launcher.stop()
    return {"error": "", "seconds": time.monotonic() - began}


if __name__ == "__main__":
    act = short_of_cpus if "short" in sys.argv else main
    print(json.dumps(asyncio.run(act(Path(sys.argv[1])))))
