"""Finds the cluster that runs on this machine, for verbs that talk to it."""

from __future__ import annotations

from dataclasses import dataclass
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

    @property
    def registry(self) -> str:
        """ConfigError where none runs here and none was named."""
        from moonpool.cluster.etcd.address import registry_of

        named = registry_of(self.config.cluster)
        return self._require().registry if self.state or not named else named

    @property
    def url(self) -> str:
        state = self._require()
        if not state.url:
            from moonpool.core.errors import ConfigError

            raise ConfigError(f"cluster.name: {state.name!r} is still starting; wait until `moonpool up` says ready")
        return state.url

    def _require(self) -> ClusterState:
        from moonpool.core.errors import ConfigError

        name = self.config.cluster.name
        if self.state is None:
            raise ConfigError(
                f"cluster.name: {name!r} is not running here ({self.state_dir.path}); start it with {verb('up', name)}, "
                "or name another one with --name",
                param="cluster.name",
            )
        return self.state


def find(name: str | None, config_file: Path | None = None, settings: list[str] | None = None) -> Running:
    from moonpool.cluster.launch.state import StateDir

    config, _ = read_config(config_file, settings, {"cluster.name": name})
    state_dir = StateDir(Path(config.cluster.state_dir))
    return Running(config, state_dir, state_dir.read())
