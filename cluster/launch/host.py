"""The hosts that a launcher puts processes on, as they themselves say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from moonpool.cluster.identity.exposure import is_loopback
from moonpool.cluster.own_host import AUTO
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.kvstore.regions import free_memory

SPARE = 0.1  # of the memory file system: left to others


@dataclass(frozen=True, slots=True)
class Host:
    """``machine`` names a kernel and one of its PID namespaces: only there a process id means the same process.

    ``memory`` and ``space`` (of the folder of region files) are bytes that are free.
    """

    address: str
    machine: str
    memory: int
    space: int

    @classmethod
    def this(cls, address: str, regions: Path) -> Host:
        """ConfigError where ``regions`` cannot be used."""
        return cls(address, machine(), free_memory(), _space(regions))


@dataclass(frozen=True, slots=True)
class Site:
    """``own``: of the supervisor, where the embedded registry is. ``links``: pages worth opening, in words."""

    own: Host
    hosts: Mapping[NodeId, Host]
    links: tuple[str, ...] = ()

    @property
    def here(self) -> list[NodeId]:
        """Node ids on the supervisor's machine."""
        return [node for node, host in self.hosts.items() if host.machine == self.own.machine]


def machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def shared_pools(config: Config, hosts: Mapping[NodeId, Host]) -> dict[NodeId, int]:
    """Where ``store.pool_bytes`` is left open, the node ids of one machine share half of what is free there, in bytes."""
    if config.store.pool_bytes:
        return {}
    sharing = Counter(host.machine for host in hosts.values())
    return {
        node: min(host.memory // 2, int(host.space * (1 - SPARE))) // sharing[host.machine]
        for node, host in hosts.items()
        if sharing[host.machine] > 1
    }


def require_fitting_hosts(config: Config, site: Site) -> None:
    """ConfigError where processes of several machines would announce or bind what only one of them understands."""
    cluster, http = config.cluster, config.gateway.host
    machines = {site.own.machine, *(host.machine for host in site.hosts.values())}
    if len(machines) > 1 and cluster.host != AUTO:
        raise ConfigError(
            f"cluster.host: {cluster.host} cannot be the address of processes on {len(machines)} machines; "
            'set cluster.host = "auto", each machine\'s own',
            param="cluster.host",
        )
    away = [node.name for node in cluster.nodes if node.gateway and NodeId(node.name) not in site.here]
    if away and is_loopback(http):
        raise ConfigError(
            f"gateway.host: {http} is reached on the gateway's own machine only, and node {away[0]} is on another one; "
            'set gateway.host = "auto" or "0.0.0.0"',
            param="gateway.host",
        )
    if len(site.hosts) > len({host.machine for host in site.hosts.values()}) and config.transfer.ucx_tls != "tcp":
        raise ConfigError(
            f"transfer.ucx_tls: {config.transfer.ucx_tls!r} is refused between node ids on one machine; use tcp, or "
            'cluster.ray_strategy = "STRICT_SPREAD"',
            param="transfer.ucx_tls",
        )


def _space(folder: Path) -> int:
    try:
        return int(psutil.disk_usage(str(folder)).free)
    except OSError as e:
        raise ConfigError(
            f"store.directory: cannot use {folder}: {e.strerror}; give a folder on a memory file system",
            param="store.directory",
        ) from e
