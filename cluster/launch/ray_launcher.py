"""Starts roles as named Ray actors: Ray places them (one placement group bundle per node id) and restarts them.

The driver is the supervisor. ``cluster.ray_address`` says in which Ray: in a local one of its own, which ends with it, or in
one that is there, whose nodes may be other hosts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from moonpool.cluster.launch.host import Host, Site, machine
from moonpool.cluster.launch.plan import ends, patience_s
from moonpool.cluster.launch.ray_actor import Cluster, RoleActor
from moonpool.cluster.launch.ray_bundles import cpus, gpus, short_of_cpus
from moonpool.cluster.launch.ray_room import Room, name_taken, names_of
from moonpool.cluster.launch.ray_session import (
    JOB_STOP_WAIT,
    LOCAL,
    Session,
    job_id,
    join,
    last_line,
    resolved,
    start_own,
    stop_wait_s,
)
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.own_host import with_own_host
from moonpool.cluster.process import EXIT_BAD_START, EXIT_RESTART, EXIT_STOPPED, READY, Make, Say
from moonpool.cluster.roles import make
from moonpool.cluster.spec import RoleSpec
from moonpool.core.blocks import load_hash_key
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.kvstore.regions import DEFAULT_DIRECTORY

RETRY_S = 0.3  # while Ray restarts an actor (2 to 3 s), calls to it are refused
FREE_S = 10.0  # for the name of a killed actor to come free
BAD_START_S = (0.5, 5.0)  # before what worked once is tried again: twice as long each time, up to the second


class RayLauncher:
    """``cpus``: what a local Ray cluster is told it has; None: the machine's cores."""

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
        self._own = config.cluster.ray_address == LOCAL
        self._cpus = cpus if cpus is not None else float(os.cpu_count() or 1)
        self._make = make
        self._scratch: Path | None = None
        self._opening: asyncio.Task[Session] | None = None
        self._room: Room | None = None
        self._hosts: dict[NodeId, Host] = {}
        self._hash_key = b""
        self._actors: dict[MemberId, Any] = {}
        self._roles: dict[MemberId, Role] = {}
        self._keepers: dict[MemberId, asyncio.Task[None]] = {}
        self._served: set[MemberId] = set()  # were ready once: their configuration can work
        self._stopping = asyncio.Event()

    async def open(self) -> Site:
        """Starts or joins Ray and takes room in it. ConfigError where it lacks something, naming it."""
        session = await (self._start_own() if self._own else self._join())
        # Ray has put a handler that dumps and aborts below Python's: what was set in Python counts again.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        self._room = await Room.find(self._config, self._say, may_grow=not self._own)
        regions = Path(self._config.store.directory or DEFAULT_DIRECTORY)
        own = Host.this(session.address, regions)
        if self._own:
            self._hosts = {NodeId(node.name): own for node in self._config.cluster.nodes}
        else:
            self._hosts = await self._room.hosts(regions)
            self._say(f"placed: {', '.join(f'{node} on {host.address}' for node, host in self._hosts.items())}")
        links = (f"Ray dashboard: http://{session.dashboard}",) if session.dashboard else ()
        return Site(own, self._hosts, links)

    async def start(self, spec: RoleSpec) -> None:
        self._actors[spec.member] = self._create(spec)
        self._roles[spec.member] = spec.role
        self._keepers[spec.member] = asyncio.create_task(self._keep(spec), name=f"keep-{spec.member}")

    async def stop(self) -> None:
        """Stops everybody in the order of ``plan.ends``, then leaves Ray, or stops it where it is our own."""
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
        if self._room:
            self._room.leave()
        if not self._own:
            await self._gone()
        await asyncio.to_thread(ray.shutdown)
        self._state.drop_scratch()

    async def _gone(self) -> None:
        """Their Ray nodes are about to end the processes: those of this machine are waited for."""
        until = asyncio.get_running_loop().time() + FREE_S
        while self._state.recorded() and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(RETRY_S)

    # Ray

    async def _start_own(self) -> Session:
        if missing := short_of_cpus(self._config, self._cpus):
            raise ConfigError(f"cluster.nodes: {missing}; run fewer of them, or use --launcher process", param="cluster.nodes")
        self._say("starting Ray")
        # Short: the paths of Ray's sockets lie below it and may not pass 107 bytes.
        self._scratch = Path(tempfile.mkdtemp(prefix="mp-ray-", dir="/tmp"))
        self._state.keep_scratch(self._scratch)
        session = await self._opened(lambda: start_own(self._config, self._scratch or Path(), self._cpus))
        for child in psutil.Process().children(recursive=True):
            self._state.record(f"ray-{child.pid}", child.pid)
        return session

    async def _join(self) -> Session:
        cluster = self._config.cluster
        self._say(f"joining Ray ({cluster.ray_address})")
        if self._config.security.tls == "off":  # its wire is as plain as ours then
            self._hash_key = load_hash_key(Path(cluster.key_file))
        session = await self._opened(lambda: join(self._config, namespace=cluster.name))
        await self._require_free_name()
        if job_id() and stop_wait_s() < patience_s(self._config):
            self._say(
                f"WARNING: `ray job stop` kills this job after {stop_wait_s():g} s, its orderly end may take "
                f"{patience_s(self._config):.0f} s; set {JOB_STOP_WAIT} in env_vars of the job's runtime environment"
            )
        return session

    async def _opened(self, open_: Callable[[], Session]) -> Session:
        self._opening = asyncio.create_task(asyncio.to_thread(open_), name="ray-init")
        return await asyncio.shield(self._opening)

    async def _require_free_name(self) -> None:
        """What a cluster that has just ended had is given a moment to go."""
        name, until = self._config.cluster.name, asyncio.get_running_loop().time() + FREE_S
        while taken := names_of(name):
            if asyncio.get_running_loop().time() > until:
                raise name_taken(name, ", ".join(taken))
            await asyncio.sleep(RETRY_S)

    def _create(self, spec: RoleSpec) -> Any:
        import ray

        assert self._room is not None
        cluster, host = self._config.cluster, self._hosts[spec.node]
        # Its own process adds what depends on its host. OMP_NUM_THREADS would be Ray's if it were not set here.
        there = replace(spec, config=with_own_host(spec.config, host.address))
        variables = {k: v for k, v in there.environment().items() if k not in os.environ and k != "UCX_MODULES"}
        sent = there if self._own else spec  # an actor may be restarted on another host
        return (
            ray.remote(RoleActor)
            .options(
                name=f"{cluster.name}/{spec.member}",
                num_cpus=cpus(spec.config, spec.role),
                num_gpus=gpus(spec.config, spec.role),
                max_restarts=cluster.max_restarts,
                max_task_retries=0,  # an effect is retried by attempts of ours, never by Ray
                scheduling_strategy=self._room.on(spec.node),
                runtime_env={"env_vars": variables},
            )
            .remote(sent.to_json(), Cluster(spec.registry, job_id(), _this_process()), self._make)
        )

    # one actor

    async def _keep(self, spec: RoleSpec) -> None:
        """Runs the role again in every actor process that Ray makes for it, until it is stopped or given up."""
        from ray.exceptions import ActorDiedError, RayActorError, RayError

        running, bad_starts, delay = False, 0, BAD_START_S[0]
        while not self._stopping.is_set():
            actor = self._actors[spec.member]
            listener = asyncio.create_task(self._listen(spec.member, actor))
            try:
                await self._arrived(spec.member, actor)
                running = True
                code, why = await resolved(actor.run.remote())
                if code == EXIT_RESTART:
                    self._say(f"[{spec.member}] left, to be started anew")
                    self._actors[spec.member] = await self._anew(spec, actor)
                    continue
                if code == EXIT_BAD_START and spec.member in self._served and bad_starts < self._config.cluster.max_restarts:
                    # It lacks something for a while, such as memory that others took when it died.
                    bad_starts += 1
                    why = why.removeprefix(f"{spec.member}: ")
                    self._say(f"[{spec.member}] cannot start ({why}); restart {bad_starts} in {delay:.1f} s")
                    if not await self._stopped_within(delay):
                        self._actors[spec.member] = await self._anew(spec, actor)
                    delay = min(2 * delay, BAD_START_S[1])
                    continue
                if code == EXIT_BAD_START:
                    self._failed(spec.member, why)
                if code in (EXIT_BAD_START, EXIT_STOPPED):
                    return
            except ValueError as e:  # Ray still has the name of the one before
                self._failed(spec.member, f"cannot be started anew: {e}")
                return
            except ActorDiedError as e:
                if not self._stopping.is_set():
                    self._failed(spec.member, f"died for good: {last_line(e)}")
                return
            except RayActorError:  # it died, or is being restarted
                if running and not self._stopping.is_set():
                    self._say(f"[{spec.member}] died; Ray restarts it")
                running = False
                await asyncio.sleep(RETRY_S)
            except RayError as e:  # nothing that Ray restarts: its node's key, its environment, its room
                if not self._stopping.is_set():
                    self._failed(spec.member, last_line(e))
                return
            finally:
                listener.cancel()

    async def _stopped_within(self, limit_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    async def _arrived(self, member: MemberId, actor: Any) -> None:
        """Another machine's process numbers mean nothing here: only those of this one are remembered."""
        pid, where = await resolved(actor.arrive.remote(self._hash_key))
        if where == machine():
            self._state.record(member, pid)

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
                line = await resolved(actor.next_line.remote())
                if line.startswith(READY):
                    self._served.add(member)
                self._say(f"[{member}] {line}")
        except RayError:
            return


def _this_process() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"
