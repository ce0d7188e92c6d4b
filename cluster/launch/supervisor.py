"""Brings a local cluster up, keeps it, and takes it down: registry, launcher, proof of death, progress."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from moonpool.cluster.etcd.address import registry_of
from moonpool.cluster.identity.exposure import require_unexposed
from moonpool.cluster.identity.folders import LAUNCHER, OPERATOR, folder_of, take
from moonpool.cluster.identity.https import trusting
from moonpool.cluster.identity.keeper import Keeper
from moonpool.cluster.launch.death_watch import DeathWatch
from moonpool.cluster.launch.host import Host, Site, require_fitting_hosts, shared_pools
from moonpool.cluster.launch.plan import plan
from moonpool.cluster.launch.state import ClusterState, ProcessRecord, StateDir
from moonpool.cluster.membership import Membership
from moonpool.cluster.own_host import LOOPBACK, with_own_host
from moonpool.cluster.process import Say
from moonpool.cluster.registry import Registry
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import Config, StoreConfig
from moonpool.core.errors import ConfigError, NoPath
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.principal import Party
from moonpool.kvstore.regions import DEFAULT_DIRECTORY, reclaim

STAGE_S = 600.0  # a process that neither joined nor ended by then is stuck
READY_S = 60.0


class Launcher(Protocol):
    async def open(self) -> Site | None:
        """Where the processes will be; None: all on this machine. MoonpoolError.

        Called once, before anything else runs in this process that does not like its forks (gRPC).
        """

    async def start(self, spec: RoleSpec) -> None:
        """Starts one process and keeps it running; returns before it is ready. MoonpoolError where it cannot start."""

    async def stop(self) -> None:
        """Stops everything it started."""


MakeLauncher = Callable[[Callable[[MemberId, str], None]], Launcher]


class Supervisor:
    """``make_launcher`` gets the function to call when a member is given up."""

    def __init__(self, config: Config, state: StateDir, make_launcher: MakeLauncher, say: Say) -> None:
        self._config, self._state, self._say = config, state, say
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._launcher = make_launcher(self._failed)
        self._registry: Registry | None = None
        self._peers: Membership | None = None
        self._deaths: DeathWatch | None = None
        self._certificates = Keeper(config, say)
        self._starting = True
        self._warned: set[str] = set()
        self.url = ""
        self.links: tuple[str, ...] = ()

    async def start(self, model_dir: Path) -> list[Member]:
        """Everything up and answering; returns the members. The first failure of any process is raised as its one line."""
        began = time.monotonic()
        self._require_unexposed([LOOPBACK])
        self._certificates.add((Party.LAUNCHER, LAUNCHER), (Party.OPERATOR, OPERATOR))
        take(self._config, LAUNCHER)
        site = await self._launcher.open() or _this_machine(self._config)
        self.links = site.links
        require_fitting_hosts(self._config, site)
        self._require_unexposed([site.own.address, *(host.address for host in site.hosts.values())])
        address = await self._open_registry(site.own.address)
        cluster, security = self._config.cluster, self._config.security
        state = ClusterState(
            ProcessRecord.of(os.getpid()),
            cluster.name,
            cluster.launcher,
            address,
            identity=str(folder_of(self._config, OPERATOR) or ""),
            trust=security.https_cert,
        )
        self._state.write(state)
        peers = self._peers = Membership(address, self._config.timing, on_fenced=lambda why, replaced: None)
        self._deaths = DeathWatch(peers, site.here)
        pools = shared_pools(self._config, site.hosts)
        for stage in plan(self._config, registry=address, model_dir=model_dir, pools=pools):
            self._say(f"starting {', '.join(spec.member for spec in stage)}")
            self._certificates.add(*((Party(spec.role.value), spec.member) for spec in stage))
            for spec in stage:
                await self._launcher.start(spec)
            await self._or_failure(self._stage_live(peers, stage))
        if any(node.gateway for node in cluster.nodes):
            gateway = peers.live(Role.GATEWAY)[0]
            self.url = gateway.details.get("url", f"http://{_reachable(self._config.gateway.host)}:{self._config.gateway.port}")
            await self._or_failure(_wait_ready(self.url, security.https_cert, READY_S))
            peers.subscribe(lambda change: self._heard(change, gateway.id))
        self._state.write(replace(state, phase="ready", url=self.url))
        self._starting = False
        self._say(f"ready after {time.monotonic() - began:.1f} s")
        return [c.member for c in peers.everybody() if c.liveness is Liveness.LIVE]

    def _heard(self, change: MemberChange, gateway: MemberId) -> None:
        """Where the gateway that was announced comes back at another port, verbs must find it there."""
        url = change.member.details.get("url", "")
        state = self._state.read()
        if change.member.id == gateway and change.liveness is Liveness.LIVE and url not in ("", self.url) and state:
            self.url = url
            self._state.write(replace(state, url=url))
            self._say(f"serving at {url} now")

    async def stop(self) -> None:
        self._say("stopping")
        await self._launcher.stop()
        if self._deaths:
            self._deaths.close()
        if self._peers:
            await self._peers.leave()
        if self._registry:
            await self._registry.close()
        await self._certificates.close()
        left = await asyncio.to_thread(self._state.end_leftovers)
        if left:
            self._say(f"ended what was left: {', '.join(left)}")
        await asyncio.to_thread(reclaim, region_directory(self._config.store))
        self._state.clear()
        self._say("stopped")

    def _require_unexposed(self, addresses: list[str]) -> None:
        """Says what is exposed where hosts have these ``addresses``, once each. ConfigError for what is refused."""
        for address in addresses:
            for warning in require_unexposed(with_own_host(self._config, address)):
                if warning not in self._warned:
                    self._warned.add(warning)
                    self._say(warning)

    async def _open_registry(self, address: str) -> str:
        if self._config.cluster.registry:
            return registry_of(self._config)
        self._registry = Registry(self._config.timing)
        return await self._registry.start(with_own_host(self._config, address).cluster.host)

    async def _stage_live(self, peers: Membership, stage: list[RoleSpec]) -> None:
        def missing() -> list[MemberId]:
            changes = {spec.member: peers.get(spec.member) for spec in stage}
            return [m for m, change in changes.items() if change is None or change.liveness is not Liveness.LIVE]

        try:
            await peers.until(lambda: not missing(), STAGE_S, "word")
        except NoPath as e:
            raise NoPath(
                f"{', '.join(missing())}: not up after {STAGE_S:.0f} s; see {self._state.path / 'logs'}", retry_after_s=1.0
            ) from e

    def _failed(self, member: MemberId, why: str) -> None:
        line = why if why.startswith(f"{member}:") else f"{member}: {why}"
        if not self._failure.done() and self._starting:
            self._failure.set_result(line)
        elif not self._starting:
            self._say(f"given up: {line}")

    async def _or_failure(self, wanted: Coroutine[Any, Any, None]) -> None:
        """Waits for ``wanted``, or raises what ended a process meanwhile."""
        task = asyncio.create_task(wanted)
        self._failure.add_done_callback(lambda _: task.cancel())
        try:
            await task
        except asyncio.CancelledError:
            if self._failure.done():
                raise ConfigError(self._failure.result()) from None
            task.cancel()
            raise


def require_free_port(config: Config) -> None:
    """ConfigError when the gateway's port is taken: said before anything has been started."""
    host, port = config.gateway.host, config.gateway.port
    count = sum(n.gateway for n in config.cluster.nodes)
    for number in range(port, port + count) if port else ():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, number))
            except OSError as e:
                raise ConfigError(
                    f"gateway.port: cannot listen on {host}:{number} ({e.strerror}); stop what uses it or give --port",
                    param="gateway.port",
                ) from e


def region_directory(store: StoreConfig) -> Path:
    return Path(store.directory) if store.directory else DEFAULT_DIRECTORY


def _this_machine(config: Config) -> Site:
    own = Host.this(LOOPBACK, region_directory(config.store))
    return Site(own, {NodeId(node.name): own for node in config.cluster.nodes})


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


async def _wait_ready(url: str, trust: str, timeout_s: float) -> None:
    until, context = time.monotonic() + timeout_s, trusting(trust, names=False) if trust else None
    while (why := await asyncio.to_thread(_why_not_ready, url, context)) is not None:
        if time.monotonic() > until:
            raise NoPath(f"gateway: {url}/ready is not ready after {timeout_s:.0f} s ({why})", retry_after_s=1.0)
        await asyncio.sleep(0.1)


def _why_not_ready(url: str, context: ssl.SSLContext | None) -> str | None:
    try:
        with urllib.request.urlopen(f"{url}/ready?model=*", timeout=2.0, context=context) as answer:
            return None if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as e:
        return f"HTTP {e.code}: {e.read(300).decode(errors='replace')}"
    except OSError as e:
        return str(e)
