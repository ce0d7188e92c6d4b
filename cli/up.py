"""``moonpool up``: a whole local cluster in the foreground, or detached."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import ClusterName, ConfigFile, Settings, read_config, say, verb

if TYPE_CHECKING:
    import asyncio

    from moonpool.cluster.launch.state import StateDir
    from moonpool.cluster.launch.supervisor import MakeLauncher
    from moonpool.core.config import Config
    from moonpool.core.membership import Member

LAPTOP = '[{"name": "a", "both": 1, "conductor": 1, "gateway": 1}]'


def up(
    launcher: Annotated[str | None, typer.Option("--launcher", help="ray or process (cluster.launcher).")] = None,
    role: Annotated[str, typer.Option("--role", help="`both`: one node whose one worker does prefill and decode.")] = "",
    model: Annotated[str | None, typer.Option("--model", help="Model name, Hugging Face id or directory (model.path).")] = None,
    host: Annotated[str | None, typer.Option("--host", help="HTTP bind address (gateway.host).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="HTTP port (gateway.port).")] = None,
    name: ClusterName = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; `moonpool down` stops it.")] = False,
    detached: Annotated[bool, typer.Option("--detached", hidden=True, help="What --detach runs in the background.")] = False,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Start a cluster, here or in Ray (cluster.ray_address), and keep it until Ctrl-C (or, detached, `moonpool down`)."""
    import asyncio

    from moonpool.cluster.launch.state import StateDir
    from moonpool.cluster.launch.supervisor import require_free_port
    from moonpool.cluster.own_host import LOOPBACK, with_own_host

    chosen = {
        "cluster.launcher": launcher,
        "cluster.nodes": _nodes(role),
        "model.path": model,
        "gateway.host": host,
        "gateway.port": None if port is None else str(port),
        "cluster.name": name,
    }
    config, _ = read_config(config_file, settings, chosen)
    state = StateDir(_state_path(config))
    _require_not_running(state, config)
    if config.cluster.ray_address == "local":  # elsewhere the gateway is on another host, perhaps
        require_free_port(with_own_host(config, LOOPBACK))
    StateDir.create(state.path)
    if detach:
        from moonpool.cli.detach import start_detached

        sys.exit(start_detached(state, sys.argv))
    sys.exit(asyncio.run(_foreground(config, state, detached)))


def _nodes(role: str) -> str | None:
    from moonpool.core.errors import ConfigError

    if role not in ("", "both"):
        raise ConfigError(f"--role: {role!r} is unknown; use both, or set cluster.nodes for another layout", param="--role")
    return LAPTOP if role == "both" else None


def _state_path(config: Config) -> Path:
    return Path(config.cluster.state_dir)


def _require_not_running(state: StateDir, config: Config) -> None:
    from moonpool.core.errors import ConfigError

    running = state.read()
    if running is not None:
        raise ConfigError(
            f"cluster.name: {config.cluster.name!r} is running already (process {running.supervisor.pid}); "
            f"stop it with {verb('down', config.cluster.name)} or give another --name",
            param="cluster.name",
        )
    left = state.end_leftovers()
    if left:
        say(f"ended what an earlier cluster left: {', '.join(left)}")
    state.clear()


async def _foreground(config: Config, state: StateDir, detached: bool) -> int:
    import asyncio
    import signal

    from moonpool.cluster.launch.supervisor import Supervisor
    from moonpool.cluster.models import local_model, with_models_fetched

    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _end, ended, state, 128 + number)
    model_dir = await asyncio.to_thread(local_model, config.model.path, say)
    config = await asyncio.to_thread(with_models_fetched, config, say)
    supervisor = Supervisor(config, state, _make_launcher(config, state), say)
    starting = asyncio.create_task(supervisor.start(model_dir))
    first: set[asyncio.Future[Any]] = {starting, ended}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            _announce(config, supervisor.url, await starting, detached, supervisor.links)
        return await ended
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await supervisor.stop()


def _end(ended: asyncio.Future[int], state: StateDir, code: int) -> None:
    """In order at the first signal; a second one ends the whole cluster at once."""
    if not ended.done():
        ended.set_result(code)
        return
    state.end_leftovers(patience_s=0.0)
    os._exit(code)


def _make_launcher(config: Config, state: StateDir) -> MakeLauncher:
    if config.cluster.launcher == "process":
        from moonpool.cluster.launch.process_launcher import ProcessLauncher

        return lambda failed: ProcessLauncher(state, say, failed, max_restarts=config.cluster.max_restarts)
    from moonpool.cluster.launch.ray_launcher import RayLauncher

    return lambda failed: RayLauncher(config, state, say, failed)


def _announce(config: Config, url: str, members: list[Member], detached: bool, links: tuple[str, ...]) -> None:
    from moonpool.cluster.identity.exposure import console_wanted
    from moonpool.cluster.sharing import advice, cores

    say("")
    for member in members:
        if "memory" in member.details:
            say(f"  {member.id:<12} {member.details['memory']}")
    if links:
        for member in members:
            say(f"  {member.id:<12} metrics http://{member.details['probe']}/metrics")
    if not url:
        say(f"\nworkers of {config.model_name} are up; gateways and conductors elsewhere serve with them\n")
        return
    for link in (*links, f"metrics of the gateway: {url}/metrics"):
        say(f"  {link}")
    message = '{"role": "user", "content": "Hello"}'
    body = f'{{"model": "{config.model_name}", "messages": [{message}], "temperature": 0, "stream": true}}'
    stops = "" if detached else "  (`ray job stop` stops it)" if links else "  (Ctrl-C stops it)"
    say(f"\nserving {', '.join(model.served_name for model in config.models)} at {url}{stops}\n")
    if console_wanted(config):
        say(f"  console: {url}/console\n")
    if config.cluster.ray_address == "local" and (hint := advice(config, cores())):
        say(f"  {hint}\n")
    security = config.security
    authority = Path(security.https_cert).parent / "ca.pem"  # as `moonpool certs make` lays them
    trust = f" --cacert {authority}" if security.https_cert and authority.exists() else ""
    key = ' -H "authorization: Bearer $MOONPOOL_API_KEY"' if security.api_keys_file else ""
    say(f"  curl -N{trust} {url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'\n")
