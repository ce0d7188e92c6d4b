"""``moonpool run ROLE``: one process of a cluster in the foreground, without a launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli.options import ConfigFile, Settings, read_config, say

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from moonpool.cluster.spec import RoleSpec
    from moonpool.core.config import Config

Role = Annotated[
    str,
    typer.Argument(metavar="ROLE", help="store, prefill, decode, both, conductor, gateway, or registry.", show_default=False),
]


def run(
    role: Role = "",
    member: Annotated[str, typer.Option("--id", help="Member id, stable over restarts; default: ROLE-0, store-NODE.")] = "",
    node: Annotated[str, typer.Option("--node", help="Node id: one per host; names the host's store node.")] = "a",
    registry: Annotated[
        str, typer.Option("--registry", help="host:port of the registry (or where ROLE registry listens), or etcd://host:port.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Which of gateway.models it serves, by name; default: [model].")] = "",
    config_file: ConfigFile = None,
    settings: Settings = None,
    spec_file: Annotated[Path | None, typer.Option("--spec", hidden=True)] = None,
) -> None:
    """Run one role in the foreground until SIGTERM or Ctrl-C."""
    import asyncio

    from moonpool.cluster.identity.exposure import require_unexposed
    from moonpool.cluster.own_host import on_this_host
    from moonpool.cluster.roles import make
    from moonpool.cluster.run import run_role

    if spec_file is not None:  # from a launcher: its words are read there, and its death ends this process
        spec = _read_spec(spec_file)
        asyncio.run(run_role(spec, make, lambda line: print(line, flush=True), lifeline=sys.stdin.fileno()))
    config, _ = read_config(config_file, settings, {"cluster.registry": registry or None})
    config = on_this_host(config)
    for warning in require_unexposed(config):
        say(warning)
    if role == "registry":
        sys.exit(asyncio.run(_run_registry(config)))
    spec = _spec(role, member, node, _of_model(config, role, model))
    sys.exit(asyncio.run(_run(spec, lambda line: say(f"{spec.member}: {line}"))))


async def _run(spec: RoleSpec, say: Callable[[str], None]) -> int:
    """A role by itself. Nobody else makes or renews its certificate where tls is auto."""
    from moonpool.cluster.identity.folders import OPERATOR
    from moonpool.cluster.identity.keeper import Keeper
    from moonpool.cluster.roles import make
    from moonpool.cluster.run import run_role
    from moonpool.core.principal import Party

    certificates = Keeper(spec.config, say)
    certificates.add((Party(spec.role.value), spec.member), (Party.OPERATOR, OPERATOR))
    try:
        return await run_role(spec, make, say)
    finally:
        await certificates.close()


def _read_spec(file: Path) -> RoleSpec:
    from moonpool.cluster.role_switch import in_kept_role
    from moonpool.cluster.spec import RoleSpec
    from moonpool.core.errors import ConfigError

    try:
        return in_kept_role(RoleSpec.from_json(file.read_text(encoding="utf-8")))
    except OSError as e:
        raise ConfigError(f"--spec: cannot read {file}: {e.strerror}", param="--spec") from e


def _of_model(config: Config, role: str, name: str) -> Config:
    from moonpool.core.errors import ConfigError

    served = [model.served_name for model in config.models]
    if name and name not in served:
        raise ConfigError(
            f"--model: {name!r} is no model of this configuration; use one of {', '.join(served)}, or add it to gateway.models",
            param="--model",
        )
    if name and role == "gateway":
        raise ConfigError("--model: a gateway serves all models; leave it out", param="--model")
    return config.of_model(name)


def _spec(role: str, member: str, node: str, config: Config) -> RoleSpec:
    from moonpool.cluster.etcd.address import registry_of
    from moonpool.cluster.models import local_model, with_models_fetched
    from moonpool.cluster.spec import RoleSpec
    from moonpool.core.errors import ConfigError
    from moonpool.core.ids import MemberId, NodeId, Role, checked_name

    names = [r.value for r in Role]
    if role not in names:
        raise ConfigError(f"ROLE: {role!r} is unknown; use one of {', '.join(names)}, registry", param="ROLE")
    if not config.cluster.registry:
        raise ConfigError(
            "--registry: missing; give host:port of a running registry (`moonpool run registry`), or etcd://host:port",
            param="registry",
        )
    if role == Role.GATEWAY:
        config = with_models_fetched(config, say)
    name = member or (f"store-{node}" if role == "store" else f"{role}-0")
    return RoleSpec(
        MemberId(checked_name(name, "--id")),
        Role(role),
        NodeId(checked_name(node, "--node")),
        config,
        registry_of(config),
        local_model(config.model.path, say) if config.model.path or role != "store" else Path(),
    )


async def _run_registry(config: Config) -> int:
    import asyncio
    import signal

    from moonpool.cluster.etcd.address import is_etcd
    from moonpool.cluster.identity.folders import OPERATOR, REGISTRY, take
    from moonpool.cluster.identity.keeper import Keeper
    from moonpool.cluster.registry import Registry
    from moonpool.core.errors import ConfigError
    from moonpool.core.principal import Party

    if is_etcd(config.cluster.registry):
        raise ConfigError(f"ROLE: {config.cluster.registry} needs no registry of ours; start the other roles", param="ROLE")
    host, _, port = config.cluster.registry.rpartition(":")
    if config.cluster.registry and not port.isdigit():
        raise ConfigError(f"--registry: {config.cluster.registry!r} is not host:port", param="registry")
    certificates, registry = Keeper(config, say), Registry(config.timing)
    certificates.add((Party.REGISTRY, REGISTRY), (Party.OPERATOR, OPERATOR))
    take(config, REGISTRY)
    say(f"registry: listening at {await registry.start(host or config.cluster.host, int(port or 0))}")
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _end, ended, number)
    code = await ended
    await registry.close()
    await certificates.close()
    return code


def _end(ended: asyncio.Future[int], number: int) -> None:
    if not ended.done():
        ended.set_result(128 + number)
