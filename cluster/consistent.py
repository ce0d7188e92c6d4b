"""What no single value of a configuration can say: names that are taken twice, roles that are missing, options that clash."""

from __future__ import annotations

from moonpool.cluster.etcd.address import is_etcd, registry_of
from moonpool.core.config import Config, NodeConfig, SchedulerConfig, SecurityConfig
from moonpool.core.errors import ConfigError, InvalidRequest
from moonpool.core.ids import checked_name
from moonpool.core.use import DEFAULT_TENANT

DECIDING = ("policy", "policy_settings", "admission", "admission_settings", "planner_settings")
MAX_MODEL_CHARS = 200
COMPILED_TILE = 16  # tokens: what the compiled backend takes of a block at once
WRITE_SIZE = "write bytes, or KiB, MiB, GiB, TiB after a number"


def require_consistent(config: Config) -> None:
    """What no single field can say."""
    cluster, timing = config.cluster, config.timing
    checked_name(cluster.name, "cluster.name")
    seen: set[str] = set()
    for node in cluster.nodes:
        checked_name(node.name, "cluster.nodes[].name")
        if node.name in seen:
            raise ConfigError(
                f"cluster.nodes: {node.name!r} appears twice; give every node its own name", param="cluster.nodes"
            )
        seen.add(node.name)
    registry_of(config)
    _check_models(config)
    _check_backend(config)
    _check_security(config.security)
    for tenant, size in config.store.quotas.items():
        if size < 0:
            raise ConfigError(f"store.quotas: {size} bytes for {tenant!r} is below 0; {WRITE_SIZE}", param="store.quotas")
    if DEFAULT_TENANT in config.store.quotas:
        raise ConfigError(
            f"store.quotas: {DEFAULT_TENANT!r} is whoever names no tenant, and has no quota; name another", param="store.quotas"
        )
    if config.security.kv_encryption != "off":
        from moonpool.kvstore.transfer.sealable import require_sealable

        require_sealable(config.transfer)
    _check_roles(config)
    _check_scheduler(config.scheduler)
    if timing.silent_after_ms < 2 * timing.heartbeat_ms:
        raise ConfigError(
            f"timing.silent_after_ms: {timing.silent_after_ms} is below two heartbeats of {timing.heartbeat_ms} ms; "
            f"use at least {2 * timing.heartbeat_ms}",
            param="timing.silent_after_ms",
        )
    one_machine = cluster.ray_address == "local" and not cluster.registry  # elsewhere it is known once their hosts are
    if one_machine and len(cluster.nodes) > 1 and config.transfer.ucx_tls != "tcp":
        raise ConfigError(
            f"transfer.ucx_tls: {config.transfer.ucx_tls!r} is refused between node ids on one machine; use tcp",
            param="transfer.ucx_tls",
        )


def _check_security(security: SecurityConfig) -> None:
    if bool(security.https_cert) != bool(security.https_key):
        missing = "security.https_key" if security.https_cert else "security.https_cert"
        raise ConfigError(f"{missing}: missing; HTTPS needs a certificate and its key", param=missing)
    if security.tls == "files" and not security.tls_dir:
        raise ConfigError(
            "security.tls_dir: missing; with tls = files name the folder of `moonpool certs make`", param="security.tls_dir"
        )


def _check_scheduler(scheduler: SchedulerConfig) -> None:
    """Names and numbers that only their owners know; imported where somebody chose other ones, since they are heavy."""
    chosen = SchedulerConfig(**{name: getattr(scheduler, name) for name in DECIDING})
    if chosen == SchedulerConfig():
        return
    from moonpool.cluster.deciding import admission_of, policy_of
    from moonpool.cluster.role_moves import planner_settings

    try:
        policy_of(scheduler)
        admission_of(scheduler)
        planner_settings(scheduler)
    except InvalidRequest as e:
        raise ConfigError(e.message, param=e.param) from e


def _check_models(config: Config) -> None:
    """Every name and alias means one model."""
    seen: set[str] = set()
    for model in config.models:
        for name in (model.served_name, *model.aliases, *model.adapters):
            if not name or len(name) > MAX_MODEL_CHARS or not name.isprintable() or (name != name.strip()):
                raise ConfigError(
                    f"model.name: {name[:MAX_MODEL_CHARS]!r} is no name of a model; use 1 to {MAX_MODEL_CHARS} printable "
                    "characters", param="model.name",
                )  # fmt: skip
            if name in seen:
                raise ConfigError(
                    f"gateway.models: {name!r} names two models; give each of gateway.models a name, aliases and adapters that "
                    "nothing else has, [model] included", param="gateway.models",
                )  # fmt: skip
            seen.add(name)


def _check_backend(config: Config) -> None:
    """What is known of a backend asked for by name without a model or a machine; the engine checks everything."""
    if config.engine.backend != "compiled":
        return
    for model in config.models:
        if model.dtype != "bfloat16":
            raise ConfigError(
                f"engine.backend: 'compiled' computes bfloat16, model.dtype of {model.served_name!r} is {model.dtype}; "
                "use auto, which takes the fastest that can, or dtype bfloat16", param="engine.backend",
            )  # fmt: skip
    if config.engine.block_tokens % COMPILED_TILE:
        raise ConfigError(
            f"engine.block_tokens: {config.engine.block_tokens} is not a multiple of {COMPILED_TILE}, which engine.backend "
            "'compiled' needs; use 64, or backend auto", param="engine.block_tokens",
        )  # fmt: skip


def _check_roles(config: Config) -> None:
    """Of every model that nodes serve."""
    nodes, served = config.cluster.nodes, {model.served_name for model in config.models}
    for node in nodes:
        if node.model and node.model not in served:
            raise ConfigError(
                f"cluster.nodes: node {node.name!r} is of model {node.model!r}; use one of {', '.join(sorted(served))}, or add "
                "it to gateway.models", param="cluster.nodes",
            )  # fmt: skip
    groups = dict.fromkeys(node.model or config.model_name for node in nodes)
    elsewhere = is_etcd(config.cluster.registry)  # gateways and conductors may have been started by others
    for model in groups:
        mine = [n for n in nodes if model == (n.model or config.model_name)]
        _check_group(model, mine, alone=len(groups) == 1, elsewhere=elsewhere)
    if not elsewhere and not sum(node.gateway for node in nodes):
        raise ConfigError("cluster.nodes: no gateway; give one node gateway = 1", param="cluster.nodes")


def _check_group(model: str, nodes: list[NodeConfig], *, alone: bool, elsewhere: bool) -> None:
    whose = "" if alone else f" of model {model!r}"
    counts = {role: sum(getattr(n, role) for n in nodes) for role in ("prefill", "decode", "both", "conductor")}
    if not counts["both"] and not (counts["prefill"] and counts["decode"]):
        raise ConfigError(
            f"cluster.nodes: {counts['prefill']} prefill, {counts['decode']} decode and no `both` worker{whose} cannot answer; "
            "give at least one prefill and one decode worker, or one `both`",
            param="cluster.nodes",
        )
    if not elsewhere and not counts["conductor"]:
        raise ConfigError(f"cluster.nodes: no conductor{whose}; give one node conductor = 1", param="cluster.nodes")
