"""``auto`` as a host: each process's own address, found where it runs, so that one configuration does for many hosts."""

from __future__ import annotations

import socket

from moonpool.cluster.etcd.address import EtcdAddress, is_etcd
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError

AUTO = "auto"
LOOPBACK = "127.0.0.1"


def with_own_host(config: Config, address: str) -> Config:
    """``config`` with ``address`` wherever a host of its is ``auto``."""
    cluster, gateway = config.cluster, config.gateway
    hosts = {name: address for name in ("host", "probe_host") if getattr(cluster, name) == AUTO}
    updates: dict[str, object] = {"cluster": cluster.model_copy(update=hosts)} if hosts else {}
    if gateway.host == AUTO:
        updates["gateway"] = gateway.model_copy(update={"host": address})
    return config.model_copy(update=updates) if updates else config


def on_this_host(config: Config) -> Config:
    """``config`` of a process by itself: ``auto`` is the address that its registry's host sees. ConfigError where none does."""
    hosts = (config.cluster.host, config.cluster.probe_host, config.gateway.host)
    return with_own_host(config, address_towards(config.cluster.registry)) if AUTO in hosts else config


def address_towards(registry: str) -> str:
    """This host's address on the way to ``registry`` (host:port, or etcd's). Nothing is sent. ConfigError: there is none."""
    where = EtcdAddress.parse(registry).endpoints[0] if is_etcd(registry) else registry
    host, _, port = where.rpartition(":")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"cluster.host: auto is this host's address on the way to {registry or 'the registry'}, and there is none ({e}); "
            "give an address of this machine",
            param="cluster.host",
        ) from e
