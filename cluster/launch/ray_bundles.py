"""What a configuration asks of Ray: one bundle per node id, and why it cannot be had. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonpool.core.config import Config, NodeConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role

# Fractions, so that the demo's two nodes fit on two cores: Ray counts them, the kernel shares the cores.
CPUS = {Role.STORE: 0.1, Role.PREFILL: 0.4, Role.DECODE: 0.4, Role.BOTH: 1.0, Role.CONDUCTOR: 0.1, Role.GATEWAY: 0.1}
COMPUTING = (Role.PREFILL, Role.DECODE, Role.BOTH)
OWN_SETTING = {"CPU": "cluster.ray_cpus", "GPU": "cluster.ray_gpus_per_worker"}
OWN_LABEL = "ray.io/node-id"  # of every node, and of no use to anybody who chooses
DIGITS = 3  # Ray counts ten-thousandths


@dataclass(frozen=True, slots=True)
class RayNode:
    """One live node as Ray knows it. ``total`` is what it has, whoever uses it."""

    address: str
    total: Mapping[str, float]
    labels: Mapping[str, str]

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether it may match: of a selector that is more than a value (``in(...)``, ``!value``) only Ray decides."""
        return all(_operator(wanted) or self.labels.get(name) == wanted for name, wanted in labels.items())


def cpus(config: Config, role: Role) -> float:
    """Of one process and the ranks that compute with it. ``config``: its own."""
    return config.cluster.ray_cpus.get(role, CPUS[role]) * _ranks(config, role)


def gpus(config: Config, role: Role) -> float:
    return config.cluster.ray_gpus_per_worker * _ranks(config, role) if role in COMPUTING else 0.0


def _ranks(config: Config, role: Role) -> int:
    return config.engine.tensor_parallel if role in COMPUTING else 1


def bundle(config: Config, node: NodeConfig) -> dict[str, float]:
    """Everything that the processes of one node id claim. ConfigError where a resource has a setting of its own."""
    for name, setting in OWN_SETTING.items():
        if name in node.resources:
            raise ConfigError(
                f"cluster.nodes: {node.name!r} has resources.{name}; set {setting} instead", param="cluster.nodes"
            )
    own = config.on_node(node)
    counts = {role: 1 if role is Role.STORE else int(getattr(node, role.value)) for role in Role}
    claims = {
        "CPU": sum(cpus(own, role) * count for role, count in counts.items()),
        "GPU": sum(gpus(own, role) * count for role, count in counts.items()),
        **node.resources,
    }
    return {name: round(amount, DIGITS) for name, amount in claims.items() if amount}


def bundles(config: Config) -> list[dict[str, float]]:
    return [bundle(config, node) for node in config.cluster.nodes]


def selectors(config: Config) -> list[dict[str, str]]:
    return [dict(node.labels) for node in config.cluster.nodes]


def shortage(config: Config, nodes: Sequence[RayNode], free: Mapping[str, float] | None = None) -> str:
    """What is missing for all node ids to be placed on ``nodes``; empty: nothing that can be seen from here.

    ``free``: what nobody uses, over all of them; None: everything.
    """
    if not nodes:
        return "Ray has no live node"
    return (
        _no_labels(config, nodes)
        or _too_big(config, nodes)
        or _too_much(config, nodes)
        or _too_few_nodes(config, nodes)
        or _too_much(config, nodes, free)
    )


def short_of_cpus(config: Config, cpus: float) -> str:
    """As ``shortage``, for a Ray that is yet to be started on a machine of so many ``cpus``."""
    needed = round(sum(one.get("CPU", 0.0) for one in bundles(config)), DIGITS)
    return f"these processes need {needed:g} CPU, Ray has {cpus:g}" if needed > cpus else ""


def _no_labels(config: Config, nodes: Sequence[RayNode]) -> str:
    for node in config.cluster.nodes:
        if not any(one.has(node.labels) for one in nodes):
            known = sorted({f"{k}={v}" for one in nodes for k, v in one.labels.items() if k != OWN_LABEL})
            wanted = ", ".join(f"{name}={value}" for name, value in node.labels.items())
            there = ", ".join(known) or "none"
            return f"node {node.name!r} wants labels {wanted}, and no Ray node has them (there are {there})"
    return ""


def _too_big(config: Config, nodes: Sequence[RayNode]) -> str:
    """One node id is always on one Ray node."""
    for node in config.cluster.nodes:
        fitting = [one for one in nodes if one.has(node.labels)]
        like_that = "like that " if node.labels else ""
        for name, amount in bundle(config, node).items():
            most = max(one.total.get(name, 0.0) for one in fitting)
            if amount > most:
                return f"node {node.name!r} needs {amount:g} {name}, no Ray node {like_that}has more than {most:g}"
    return ""


def _too_much(config: Config, nodes: Sequence[RayNode], free: Mapping[str, float] | None = None) -> str:
    needed: dict[str, float] = {}
    for one in bundles(config):
        for name, amount in one.items():
            needed[name] = round(needed.get(name, 0.0) + amount, DIGITS)
    for name, amount in needed.items():
        total = sum(one.total.get(name, 0.0) for one in nodes)
        if free is None and amount > total:
            return f"these processes need {amount:g} {name}, Ray has {total:g}"
        if free is not None and amount > free.get(name, 0.0):
            return f"these processes need {amount:g} {name}, {free.get(name, 0.0):g} of Ray's {total:g} are free"
    return ""


def _too_few_nodes(config: Config, nodes: Sequence[RayNode]) -> str:
    wanted, strategy = len(config.cluster.nodes), config.cluster.ray_strategy
    if strategy == "STRICT_SPREAD" and wanted > len(nodes):
        return f"cluster.ray_strategy STRICT_SPREAD needs {wanted} Ray nodes, there are {len(nodes)}"
    if strategy == "STRICT_PACK":
        for name in sorted({name for one in bundles(config) for name in one}):
            needed = round(sum(one.get(name, 0.0) for one in bundles(config)), DIGITS)
            most = max((one.total.get(name, 0.0) for one in nodes), default=0.0)
            if needed > most:
                return f"cluster.ray_strategy STRICT_PACK needs {needed:g} {name} on one Ray node, none has more than {most:g}"
    return ""


def _operator(wanted: str) -> bool:
    return wanted.startswith(("!", "in("))
