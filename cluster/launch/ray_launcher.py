"""Starts roles as named Ray actors: Ray places them (one placement group bundle per node id) and restarts them.

The driver is the supervisor; it owns a local Ray cluster of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from moonpool.cluster.launch.plan import ends
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.process import EXIT_BAD_START, EXIT_RESTART, EXIT_STOPPED, Make, Say
from moonpool.cluster.roles import make
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import Config, NodeConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, Role

# Fractions, so that the demo's two nodes fit on two cores: Ray counts them, the kernel shares the cores.
CPUS = {Role.STORE: 0.1, Role.PREFILL: 0.4, Role.DECODE: 0.4, Role.BOTH: 1.0, Role.CONDUCTOR: 0.1, Role.GATEWAY: 0.1}
PLACE_S = 30.0
RETRY_S = 0.3  # while Ray restarts an actor (2 to 3 s), calls to it are refused
FREE_S = 10.0  # for the name of a killed actor to come free
OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes: no token and no KV goes through it


def cpus_of(node: NodeConfig) -> float:
    workers = {Role.PREFILL: node.prefill, Role.DECODE: node.decode, Role.BOTH: node.both}
    return round(
        CPUS[Role.STORE]
        + sum(CPUS[role] * count for role, count in workers.items())
        + CPUS[Role.CONDUCTOR] * node.conductor
        + CPUS[Role.GATEWAY] * node.gateway,
        3,
    )


class RayLauncher:
    """``cpus``: what the local Ray cluster is told it has; None: the machine's cores."""

    def __init__(
        self,
        config: Config,
        state: StateDir,
        say: Say,
        failed: Callable[[MemberId, str], None],
        *,
        cpus: float | None = None,
        make: Make = make,
    ) -> None:
        self._config, self._state, self._say, self._failed = config, state, say, failed
        self._cpus = cpus if cpus is not None else float(os.cpu_count() or 1)
        self._make = make
        self._scratch: Path | None = None
        self._opening: asyncio.Task[None] | None = None
        self._group: Any = None
        self._actors: dict[MemberId, Any] = {}
        self._roles: dict[MemberId, Role] = {}
        self._keepers: dict[MemberId, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    async def open(self) -> None:
        """Starts Ray. ConfigError, at once, when it has fewer CPUs than the processes need."""
        needed = round(sum(cpus_of(n) for n in self._config.cluster.nodes), 3)
        if needed > self._cpus:
            raise ConfigError(
                f"cluster.nodes: these processes need {needed:g} CPU, Ray has {self._cpus:g}; "
                "run fewer of them, or use --launcher process",
                param="cluster.nodes",
            )
        self._say("starting Ray")
        # Short: the paths of Ray's sockets lie below it and may not pass 107 bytes.
        self._scratch = Path(tempfile.mkdtemp(prefix="mp-ray-", dir="/tmp"))
        self._state.keep_scratch(self._scratch)
        self._opening = asyncio.create_task(asyncio.to_thread(self._init), name="ray-init")
        await asyncio.shield(self._opening)
        # Ray has put a handler that dumps and aborts below Python's: what was set in Python counts again.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        for child in psutil.Process().children(recursive=True):
            self._state.record(f"ray-{child.pid}", child.pid)
        await self._place()

    async def start(self, spec: RoleSpec) -> None:
        self._actors[spec.member] = self._create(spec)
        self._roles[spec.member] = spec.role
        self._keepers[spec.member] = asyncio.create_task(self._keep(spec), name=f"keep-{spec.member}")

    async def stop(self) -> None:
        """Stops everybody in the order of ``plan.ends``, then Ray itself."""
        self._stopping.set()
        if self._opening is None:
            return
        import ray

        await asyncio.gather(self._opening, return_exceptions=True)  # half a Ray cannot be shut down
        for stage, limit_s in ends(self._config, self._roles.items()):
            for member in stage:
                self._actors[member].stop.remote()
            await asyncio.wait([self._keepers[member] for member in stage], timeout=limit_s)
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        await asyncio.to_thread(ray.shutdown)
        self._state.drop_scratch()

    def _init(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # on loopback, one user; token in shared deployments
        # Ray would kill our actors once the whole machine, whoever fills it, is 95 % full. Budgets are checked at start-up.
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        ray.init(
            address="local",
            namespace=self._config.cluster.name,
            num_cpus=self._cpus,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self._scratch),
            _node_ip_address=self._config.cluster.host,
        )

    async def _place(self) -> None:
        from ray.util.placement_group import placement_group

        bundles = [{"CPU": cpus_of(node)} for node in self._config.cluster.nodes]
        self._group = placement_group(bundles, strategy="SPREAD", name=f"{self._config.cluster.name}/nodes")
        try:
            await asyncio.wait_for(_resolved(self._group.ready()), PLACE_S)
        except TimeoutError as e:
            raise ConfigError(
                f"cluster.nodes: Ray did not place {bundles} within {PLACE_S:.0f} s; missing: CPU", param="cluster.nodes"
            ) from e

    def _create(self, spec: RoleSpec) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from moonpool.cluster.launch.ray_actor import RoleActor

        names = [node.name for node in self._config.cluster.nodes]
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=names.index(spec.node))
        variables = {k: v for k, v in spec.environment().items() if k not in os.environ}
        return (
            ray.remote(RoleActor)
            .options(
                name=f"{self._config.cluster.name}/{spec.member}",
                num_cpus=CPUS[spec.role],
                max_restarts=self._config.cluster.max_restarts,
                max_task_retries=0,  # an effect is retried by attempts of ours, never by Ray
                scheduling_strategy=where,
                runtime_env={"env_vars": variables},
            )
            .remote(spec.to_json(), self._make)
        )

    # one actor

    async def _keep(self, spec: RoleSpec) -> None:
        """Runs the role again in every actor process that Ray makes for it, until it is stopped or given up."""
        from ray.exceptions import ActorDiedError, RayActorError

        running = False
        while not self._stopping.is_set():
            actor = self._actors[spec.member]
            listener = asyncio.create_task(self._listen(spec.member, actor))
            try:
                self._state.record(spec.member, await _resolved(actor.pid.remote()))
                running = True
                code, why = await _resolved(actor.run.remote())
                if code == EXIT_RESTART:
                    self._say(f"[{spec.member}] left, to be started anew")
                    self._actors[spec.member] = await self._anew(spec, actor)
                    continue
                if code == EXIT_BAD_START:
                    self._failed(spec.member, why)
                if code in (EXIT_BAD_START, EXIT_STOPPED):
                    return
            except ActorDiedError as e:
                if not self._stopping.is_set():
                    self._failed(spec.member, f"died for good: {_last_line(e)}")
                return
            except RayActorError:  # it died, or is being restarted
                if running and not self._stopping.is_set():
                    self._say(f"[{spec.member}] died; Ray restarts it")
                running = False
                await asyncio.sleep(RETRY_S)
            finally:
                listener.cancel()

    async def _anew(self, spec: RoleSpec, actor: Any) -> Any:
        """A new actor in the place of ``actor``, which has left: Ray counts no restart."""
        import ray

        ray.kill(actor, no_restart=True)
        until = asyncio.get_running_loop().time() + FREE_S
        while True:
            try:
                return self._create(spec)
            except ValueError:  # its name is still taken
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(RETRY_S)

    async def _listen(self, member: MemberId, actor: Any) -> None:
        from ray.exceptions import RayError

        try:
            while True:
                self._say(f"[{member}] {await _resolved(actor.next_line.remote())}")
        except RayError:
            return


async def _resolved(reference: Any) -> Any:
    return await reference


def _last_line(error: BaseException) -> str:
    """Ray puts the actor's own traceback into its error; the cause stands last."""
    lines: Sequence[str] = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
