"""The cluster that is struck: two node ids with one of every role each, kept by a supervisor of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from moonpool.bench.chaos.clocks import Clocks
from moonpool.bench.chaos.kinds import KILL_MS, ROLES, SILENT_MS
from moonpool.bench.chaos.members import MEMBERS, SIDES
from moonpool.bench.chaos.network import LOOPBACK, OURS, Network, die_with_parent
from moonpool.bench.chaos.registries import Embedded, Etcd, RegistryProcess
from moonpool.bench.chaos.supervise import Place, Plan
from moonpool.cluster.etcd.address import registry_of
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.survey import members
from moonpool.core.config import MIB, Config
from moonpool.core.errors import ConfigError, MoonpoolError
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, MemberChange
from moonpool.wire import pb
from moonpool.wire.channels import dial

START_S = 240.0
STOP_S = 60.0
SSD_BYTES = 12 * MIB
DEVICE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Choices:
    registry: str = "embedded"  # or etcd
    settings: Mapping[str, str] | None = None  # section.key -> value, over the run's own


def settings_of(choices: Choices, folder: Path, model_dir: Path, name: str, registry: str, tiny: bool) -> dict[str, str]:
    """Small enough that blocks are evicted, demoted and fetched all the time."""
    nodes = [{"name": side, **{role.value: 1 for role in ROLES if role is not Role.STORE}} for side in SIDES]
    sizes = {
        "engine.block_tokens": "16",
        "engine.pages": "220",
        "store.pool_bytes": str(4 * MIB),
        "store.region_bytes": str(MIB),
        "store.ssd_bytes": str(SSD_BYTES),
        "store.ssd_path": str(folder / "ssd"),
    }
    return {
        "model.path": str(model_dir),
        "model.name": "chaos",
        "model.dtype": "float32",
        "engine.poison": "true",
        **(sizes if tiny else {"store.pool_bytes": str(256 * MIB), "engine.page_bytes": str(192 * MIB)}),
        "gateway.port": "0",
        "timing.silent_after_ms": str(SILENT_MS),
        "timing.kill_after_ms": str(KILL_MS),
        "timing.request_budget_ms": "60000",
        "cluster.name": name,
        "cluster.nodes": json.dumps(nodes),
        "cluster.launcher": "process",
        "cluster.state_dir": str(folder / "state"),
        "cluster.key_file": str(folder / "hash.key"),
        "cluster.max_restarts": "1000000",
        "cluster.registry": registry,
        "security.allow_plain": "true",  # the network is this machine's alone
        **(choices.settings or {}),
    }


class House:
    """``network`` and ``clocks`` are None where the machine does not allow them."""

    def __init__(
        self, folder: Path, model_dir: Path, choices: Choices, *, network: Network | None, clocks: Clocks | None, tiny: bool
    ) -> None:
        from moonpool.cluster.configure import load_config

        self.folder, self.network, self.clocks = folder, network, clocks
        self.name = f"chaos-{os.getpid()}"
        host = OURS if network else LOOPBACK
        timing = [f"timing.silent_after_ms={SILENT_MS}"]
        if choices.registry == "etcd":
            self.registry: RegistryProcess = Etcd(host, folder / "registry")
        else:
            self.registry = Embedded(host, folder / "registry", timing)
        values = settings_of(choices, folder, model_dir, self.name, self.registry.name, tiny)
        self.config: Config = load_config(None, {}, values)[0]
        self._plan = Plan(self.config, model_dir, {member: self._place(member) for member in MEMBERS})
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[str, MemberChange] = {}
        self.urls: dict[str, str] = {}

    def _place(self, member: str) -> Place:
        network = self.network
        variables = self.clocks.environment(member) if self.clocks else {}
        before = tuple(network.into(member)) if network else ()
        return Place(network.address(member) if network else LOOPBACK, before, tuple(variables.items()))

    # -- its life ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.registry.start()
        plan = self.folder / "plan.json"
        plan.write_text(self._plan.to_json(), encoding="utf-8")
        with (self.folder / "up.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moonpool.bench.chaos.supervise", str(plan)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGINT),
            )

    async def ready(self) -> None:
        """ConfigError where it does not become ready."""
        states, until = StateDir(self.folder / "state"), time.monotonic() + START_S
        assert self._process is not None
        while (state := states.read()) is None or state.phase != "ready":
            if self._process.poll() is not None or time.monotonic() > until:
                tail = (self.folder / "up.log").read_text(errors="replace")[-2000:]
                raise ConfigError(f"chaos: the cluster did not start:\n{tail}", param="chaos")
            await asyncio.sleep(0.1)
        while missing := await self.unready(MEMBERS):
            if time.monotonic() > until:
                raise ConfigError(f"chaos: not ready: {', '.join(missing)}", param="chaos")
            await asyncio.sleep(0.2)

    def end(self) -> list[str]:
        """Stops everything; one line for each thing that is left behind."""
        process, self._process = self._process, None
        left: list[str] = []
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                code = process.wait(STOP_S)
                left += [f"supervisor: exit code {code}"] if code else []
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                left.append(f"supervisor: did not stop within {STOP_S:.0f} s")
        left += [f"process {name} is left: {record.pid}" for name, record in self._states().recorded().items()]
        self._states().end_leftovers()
        self.registry.stop()
        return left

    def _states(self) -> StateDir:
        return StateDir(self.folder / "state")

    # -- looking into it ---------------------------------------------------------------------------------------------

    def pid(self, member: str) -> int:
        """Of the process that runs it now; 0: none does."""
        record = self._states().recorded().get(member)
        return record.pid if record else 0

    async def look(self) -> dict[str, MemberChange]:
        """What the registry says now. MoonpoolError where it does not answer."""
        self._known = {change.member.id: change for change in await members(registry_of(self.config))}
        for name, change in self._known.items():
            if change.member.role is Role.GATEWAY and (url := change.member.details.get("url")):
                self.urls[name] = url
        return self._known

    async def unready(self, wanted: tuple[str, ...], *, without: int = 0) -> list[str]:
        """Those of ``wanted`` that are not live and ready, in the registry's words and by a living process other than
        ``without`` (which was killed, and may take a moment to go).
        """
        try:
            known = await self.look()
        except MoonpoolError:
            return list(wanted)
        alive = self._states().recorded()
        return [
            name
            for name in wanted
            if name not in known
            or known[name].liveness is not Liveness.LIVE
            or not known[name].member.ready
            or name not in alive
            or known[name].member.pid != alive[name].pid
            or known[name].member.pid == without
        ]

    async def numbers(self) -> dict[str, dict[str, float]]:
        """Gauges of everybody who answers."""
        asked = [(name, change.member.address) for name, change in self._known.items() if change.liveness is Liveness.LIVE]
        answers = await asyncio.gather(*(_numbers(address) for _, address in asked))
        return {name: numbers for (name, _), numbers in zip(asked, answers, strict=True) if numbers}


async def _numbers(address: str) -> dict[str, float]:
    async with dial(address) as channel:
        try:
            return dict((await pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=3.0)).numbers)
        except grpc.aio.AioRpcError:
            return {}
