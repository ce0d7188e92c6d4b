"""From a configuration to the processes of a local cluster, in start-up order. Pure: both launchers share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from moonpool.cluster.leaving import END_S, end_s
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, NodeId, Role

LAST_PORT = 65_535

# A stage starts once every process of the one before has joined: workers need their host's store node.
STAGES: tuple[tuple[Role, ...], ...] = (
    (Role.STORE,),
    (Role.PREFILL, Role.DECODE, Role.BOTH, Role.CONDUCTOR, Role.GATEWAY),
)

# Ending goes the other way: nobody is asked any more, then nobody computes, then what nobody else holds is moved out.
ENDS: tuple[tuple[Role, ...], ...] = (
    (Role.GATEWAY,),
    (Role.PREFILL, Role.DECODE, Role.BOTH, Role.CONDUCTOR),
    (Role.STORE,),
)


def ends(config: Config, members: Iterable[tuple[MemberId, Role]]) -> list[tuple[list[MemberId], float]]:
    """Who is stopped together, and the seconds they get; last started first."""
    started = list(members)
    found = []
    for roles in ENDS:
        stage = [member for member, role in reversed(started) if role in roles]
        if stage:
            found.append((stage, max(end_s(config, role) for role in roles)))
    return found


def patience_s(config: Config) -> float:
    """What an orderly end of a whole cluster takes at the most, in seconds."""
    return END_S + sum(max(end_s(config, role) for role in roles) for roles in ENDS)


def plan(config: Config, *, registry: str, model_dir: Path, pools: Mapping[NodeId, int] | None = None) -> list[list[RoleSpec]]:
    """One list per stage. Ids number a role's processes over all nodes: store-a, prefill-0, prefill-1, decode-0.

    ``model_dir`` is that of [model]; processes find the directories of further models themselves, by their paths.
    ``pools``: bytes of the pools that are not as configured.
    ConfigError where the ports that were chosen are too few.
    """
    _require_ports(config)
    counts: dict[Role, int] = {}
    stages: list[list[RoleSpec]] = []
    for roles in STAGES:
        stage = []
        for role in roles:
            for node in config.cluster.nodes:
                for _ in range(1 if role is Role.STORE else getattr(node, role.value)):
                    number = counts.get(role, 0)
                    counts[role] = number + 1
                    name = f"store-{node.name}" if role is Role.STORE else f"{role.value}-{number}"
                    gateway = role is Role.GATEWAY  # which serves all models
                    own = _own_port(config, number) if gateway else config.of_model(node.model).on_node(node)
                    directory = model_dir if gateway or own.model == config.model else Path(own.model.path)
                    own = _own_ports(own, role, number, sum(counts.values()) - 1)
                    own = _own_pool(own, (pools or {}).get(NodeId(node.name), 0))
                    stage.append(RoleSpec(MemberId(name), role, NodeId(node.name), own, registry, directory))
        stages.append(stage)
    return stages


def _require_ports(config: Config) -> None:
    nodes = config.cluster.nodes
    gateways = sum(node.gateway for node in nodes)
    processes = len(nodes) + gateways + sum(node.prefill + node.decode + node.both + node.conductor for node in nodes)
    ports = (
        ("cluster.port", config.cluster.port, processes),
        ("cluster.probe_port", config.cluster.probe_port, processes),
        ("transfer.port", config.transfer.port, len(nodes)),
        ("gateway.port", config.gateway.port, gateways),
    )
    for key, first, count in ports:
        if first and first + count - 1 > LAST_PORT:
            raise ConfigError(
                f"{key}: {first} and above are fewer ports than the {count} that are needed; use at most "
                f"{LAST_PORT + 1 - count}, or 0 for any free ones",
                param=key,
            )


def _own_port(config: Config, number: int) -> Config:
    """Gateways after the first take the ports above it; port 0 lets the system choose for each."""
    if not number or not config.gateway.port:
        return config
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": config.gateway.port + number})})


def _own_ports(config: Config, role: Role, number: int, process: int) -> Config:
    """Processes after the first (of all), and store nodes after the first, take the ports above the ones that were chosen."""
    cluster, transfer = config.cluster, config.transfer
    ports = {name: getattr(cluster, name) + process for name in ("port", "probe_port") if getattr(cluster, name)}
    kv = {"port": transfer.port + number} if transfer.port and role is Role.STORE else {}
    update = {"cluster": cluster.model_copy(update=ports), "transfer": transfer.model_copy(update=kv)}
    return config.model_copy(update=update)


def _own_pool(config: Config, size: int) -> Config:
    """``size``: bytes; 0: as configured."""
    return config.model_copy(update={"store": config.store.model_copy(update={"pool_bytes": size})}) if size else config
