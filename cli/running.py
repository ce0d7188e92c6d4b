"""Finds the cluster that verbs talk to: whose registry was named, else what runs on this machine, else in a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.cli.options import read_config, verb

if TYPE_CHECKING:
    from moonpool.cluster.launch.state import ClusterState, StateDir
    from moonpool.core.config import Config


@dataclass(frozen=True, slots=True)
class Running:
    config: Config
    state_dir: StateDir
    state: ClusterState | None
    in_ray: str = ""  # registry of the cluster of this name in the Ray cluster that the configuration names

    @property
    def named(self) -> str:
        """The registry that the configuration names, by itself or by its Ray cluster, whatever runs here; empty: none."""
        from moonpool.cluster.etcd.address import registry_of

        return self.in_ray or registry_of(self.config)

    @property
    def registry(self) -> str:
        """Of the named one, else of the cluster that runs here. ConfigError where there is neither."""
        return self.named or self._require().registry

    @property
    def local(self) -> ClusterState | None:
        """What runs here, if it is the cluster that is meant."""
        return self.state if self.state is not None and self.named in ("", self.state.registry) else None

    @property
    def url(self) -> str:
        """Of a gateway. ConfigError where none is ready."""
        from moonpool.core.errors import ConfigError

        if self.named and self.local is None:
            return _gateway_url(self.named)
        state = self._require()
        if not state.url:
            raise ConfigError(f"cluster.name: {state.name!r} is still starting; wait until `moonpool up` says ready")
        return state.url

    def _require(self) -> ClusterState:
        from moonpool.core.errors import ConfigError

        name = self.config.cluster.name
        if self.state is None:
            if alone := _alone(self.state_dir.path):
                raise ConfigError(
                    f"cluster.name: {name!r} is one store node by itself (`moonpool store serve`, process {alone}): it has no "
                    "registry and no gateway, and answers users of the library only (docs/library.md); for the other verbs "
                    "start a cluster with `moonpool up`, or name one with --name",
                    param="cluster.name",
                )
            raise ConfigError(
                f"cluster.name: {name!r} is not running here ({self.state_dir.path}); start it with {verb('up', name)}, "
                "or name another one with --name",
                param="cluster.name",
            )
        return self.state


def _alone(folder: Path) -> int:
    """The process of a store node by itself that uses the state folder; 0: none does."""
    from moonpool.cluster.alone import NODE
    from moonpool.kvstore.node_lock import holder

    return holder(folder, NODE)


def _gateway_url(registry: str) -> str:
    import asyncio

    from moonpool.cluster.survey import members
    from moonpool.core.errors import ConfigError
    from moonpool.core.membership import Liveness

    for change in asyncio.run(members(registry)):
        url = change.member.details.get("url", "")
        if url and change.liveness is Liveness.LIVE:
            return url
    raise ConfigError(
        f"cluster.registry: {registry} knows no live gateway; give its address by --url", param="cluster.registry"
    )


def find(
    name: str | None, config_file: Path | None = None, settings: list[str] | None = None, *, calls: bool = True
) -> Running:
    """``calls``: from then on this process shows the operator's certificate, where the cluster has TLS."""
    from moonpool.cluster.identity.folders import take_operator
    from moonpool.cluster.launch.state import StateDir

    config, _ = read_config(config_file, settings, {"cluster.name": name})
    state_dir = StateDir(Path(config.cluster.state_dir))
    running = Running(config, state_dir, state_dir.read())
    if calls and running.state is None and not running.named and config.cluster.ray_address != "local":
        from moonpool.cluster.launch.ray_finder import find as find_in_ray

        running = replace(running, in_ray=find_in_ray(config).registry)
    if calls:
        take_operator(config, running.local.identity if running.local else "")
    return running
