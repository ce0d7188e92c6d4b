"""Room in Ray for the processes: one placement group, and what its hosts say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from moonpool import __version__
from moonpool.cluster.launch.host import Host
from moonpool.cluster.launch.ray_bundles import RayNode, bundles, selectors, shortage
from moonpool.cluster.launch.ray_session import last_line, resolved
from moonpool.cluster.process import Say
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId

SURVEY_S = 600.0  # a node may have to install the job's runtime environment first


class Room:
    """The placement group of one cluster, one bundle per node id in the order of ``cluster.nodes``."""

    def __init__(self, config: Config, group: Any) -> None:
        self._config, self._group = config, group

    @classmethod
    async def find(cls, config: Config, say: Say, *, may_grow: bool) -> Room:
        """Waits until Ray has placed all bundles. ConfigError, in bounded time, naming what is missing.

        ``may_grow``: nodes may still join; otherwise what Ray has now is all there will be.
        """
        from ray.exceptions import RaySystemError
        from ray.util.placement_group import placement_group, remove_placement_group

        cluster, wanted = config.cluster, bundles(config)
        missing = shortage(config, _nodes())
        if missing and not may_grow:
            raise _no_room(missing)
        if missing:
            say(f"waiting {cluster.ray_place_ms / 1000:g} s for Ray to grow: {missing}")
        labels = selectors(config) if any(selectors(config)) else None
        name = _group_name(cluster.name)
        try:
            group = placement_group(wanted, strategy=cluster.ray_strategy, name=name, bundle_label_selector=labels)
        except RaySystemError as e:
            if names_of(cluster.name):  # another start was faster
                raise name_taken(cluster.name, name) from e
            raise
        try:
            await asyncio.wait_for(resolved(group.ready()), cluster.ray_place_ms / 1000)
        except TimeoutError as e:
            missing = shortage(config, _nodes(), _free())
            remove_placement_group(group)
            others = f"the bundles {wanted} do not fit beside what runs there (cluster.ray_strategy {cluster.ray_strategy})"
            raise _no_room(f"not placed within {cluster.ray_place_ms / 1000:g} s: {missing or others}") from e
        return cls(config, group)

    def on(self, node: NodeId) -> Any:
        """Where an actor or task of ``node`` is scheduled."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        names = [one.name for one in self._config.cluster.nodes]
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=names.index(node))

    async def hosts(self, regions: Path) -> dict[NodeId, Host]:
        """Asks every bundle's host. ConfigError where it has not this package, another version of it, or no answer."""
        nodes = [NodeId(node.name) for node in self._config.cluster.nodes]
        try:
            async with asyncio.timeout(SURVEY_S):
                return dict(zip(nodes, await asyncio.gather(*(self._ask(node, regions) for node in nodes)), strict=True))
        except TimeoutError as e:
            raise ConfigError(
                f"cluster.ray_address: the nodes {', '.join(nodes)} do not all say within {SURVEY_S:.0f} s that they can run "
                "this package; see the logs of the job's runtime environment (docs/ray.md)",
                param="cluster.ray_address",
            ) from e

    async def _ask(self, node: NodeId, regions: Path) -> Host:
        import ray
        from ray.exceptions import RayError

        ask = ray.remote(_say_host).options(num_cpus=0, max_retries=3, scheduling_strategy=self.on(node))
        try:
            version, host = cast("tuple[str, Host]", await resolved(ask.remote(str(regions))))
        except RayError as e:
            raise ConfigError(
                f"cluster.ray_address: node {node!r}: its Ray node cannot run this package ({last_line(e)}); "
                "put it into the nodes' image or the job's runtime environment (docs/ray.md)",
                param="cluster.ray_address",
            ) from e
        if version != __version__:
            raise ConfigError(
                f"cluster.ray_address: node {node!r}: {host.address} has moonpool {version}, this job {__version__}; "
                "give both the same one (docs/ray.md)",
                param="cluster.ray_address",
            )
        return host

    def leave(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def names_of(cluster: str) -> list[str]:
    """What a cluster of this name has in Ray: actors, and its room, which it may wait for before it has any of them."""
    from ray.util import list_named_actors
    from ray.util.placement_group import placement_group_table

    actors = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == cluster]
    groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
    return sorted([*actors, *(name for name in groups if name == _group_name(cluster))])


def name_taken(cluster: str, by: str) -> ConfigError:
    return ConfigError(
        f"cluster.name: {cluster!r} runs in this Ray already ({by}); stop it, or give another", param="cluster.name"
    )


def _group_name(cluster: str) -> str:
    return f"{cluster}/nodes"


def _say_host(regions: str) -> tuple[str, Host]:
    """Runs on the host that is asked."""
    import ray

    return __version__, Host.this(ray.util.get_node_ip_address(), Path(regions))


def _nodes() -> Sequence[RayNode]:
    import ray

    return [RayNode(str(n["NodeManagerAddress"]), n["Resources"], n.get("Labels") or {}) for n in ray.nodes() if n["Alive"]]


def _free() -> dict[str, float]:
    import ray

    found: dict[str, float] = ray.available_resources()
    return found


def _no_room(why: str) -> ConfigError:
    return ConfigError(
        f"cluster.nodes: {why}; run fewer processes, give Ray more, or use --launcher process", param="cluster.nodes"
    )
