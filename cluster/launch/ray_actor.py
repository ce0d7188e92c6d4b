"""What runs inside a Ray actor's process: one role's shell. Ray calls it for control only, never with tokens or KV."""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.cluster.furnishing import furnish
from moonpool.cluster.launch.host import machine
from moonpool.cluster.launch.ray_session import LOCAL
from moonpool.cluster.launch.reaper import reap_after
from moonpool.cluster.models import local_model
from moonpool.cluster.own_host import with_own_host
from moonpool.cluster.process import EXIT_BAD_START, Make, Process, Say
from moonpool.cluster.role_switch import in_kept_role
from moonpool.cluster.spec import RoleSpec
from moonpool.core.errors import MoonpoolError
from moonpool.core.ids import Role
from moonpool.core.key_files import keep_key
from moonpool.kvstore.regions import DEFAULT_DIRECTORY

KEPT_LINES = 256


@dataclass(frozen=True, slots=True)
class Cluster:
    """What any actor tells of the cluster it is part of. ``job``: submission id of its Ray job; empty: it is none."""

    registry: str
    job: str
    supervisor: str  # its process and host, in words


class RoleActor:
    """``run`` is the life of the process's role. A restarted actor is a new object that has to be run again.

    ``cluster`` is for those who find it by Ray.
    """

    def __init__(self, spec: str, cluster: Cluster, make: Make) -> None:
        import ray

        kept = in_kept_role(RoleSpec.from_json(spec))
        self._spec = replace(kept, config=with_own_host(kept.config, ray.util.get_node_ip_address()))
        furnish(self._spec)
        self._cluster, self._make = cluster, make
        self._process: Process | None = None
        self._stopped = False
        self._lines: asyncio.Queue[str] = asyncio.Queue(KEPT_LINES)

    async def arrive(self, hash_key: bytes) -> tuple[int, str]:
        """This process, and the machine on which that number means it. ``hash_key`` is kept where this host has none yet."""
        if hash_key:
            keep_key(Path(self._spec.config.cluster.key_file), hash_key, "cluster.key_file")
        return os.getpid(), machine()

    async def about(self) -> Cluster:
        return self._cluster

    async def run(self) -> tuple[int, str]:
        """Starts the role and stays until it is stopped: (exit code, why it could not start)."""
        self._loop = asyncio.get_running_loop()
        try:
            spec = await asyncio.to_thread(_with_local_model, self._spec, self._say)
        except MoonpoolError as e:
            return EXIT_BAD_START, e.message
        self._process = Process(spec, self._make, self._say)
        if self._stopped:
            self._process.stop()
        reaper = _reaper(spec)
        code, why = await self._process.live()
        if reaper:
            reaper.terminate()
        return code, why

    async def stop(self) -> None:
        self._stopped = True
        if self._process:
            self._process.stop()

    async def next_line(self) -> str:
        """The next progress line, as soon as there is one."""
        return await self._lines.get()

    def _say(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._put, line)

    def _put(self, line: str) -> None:
        if self._lines.full():
            self._lines.get_nowait()
        self._lines.put_nowait(line)


def _reaper(spec: RoleSpec) -> subprocess.Popen[bytes] | None:
    """Of a store node on a host where nobody else of its cluster would come by."""
    if spec.role is not Role.STORE or spec.config.cluster.ray_address == LOCAL:
        return None
    store = spec.config.store
    return reap_after(os.getpid(), Path(store.directory or DEFAULT_DIRECTORY), zeroise=spec.config.security.zeroise)


def _with_local_model(spec: RoleSpec, say: Say) -> RoleSpec:
    """The model as the driver found it, where this host has it there, too; else as ``model.path`` names it here."""
    elsewhere = spec.config.cluster.ray_address != LOCAL and spec.config.model.path
    if not elsewhere or (spec.model_dir / "config.json").is_file():
        return spec
    return replace(spec, model_dir=local_model(spec.config.model.path, say))
