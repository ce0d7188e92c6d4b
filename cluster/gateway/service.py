"""The gateway process's service: HTTP in front, conductors and decode workers behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from moonpool.cluster.gateway.accounts import Accounts
from moonpool.cluster.gateway.app import build_app
from moonpool.cluster.gateway.conductors import RETRY_AFTER_S
from moonpool.cluster.gateway.connections import ConnectionLimits, Connections
from moonpool.cluster.gateway.console.console import Console
from moonpool.cluster.gateway.console.routes import console_router
from moonpool.cluster.gateway.decode_client import DecodeStreams
from moonpool.cluster.gateway.endpoints import Endpoints
from moonpool.cluster.gateway.goodbye import Goodbye
from moonpool.cluster.gateway.metrics import Metrics
from moonpool.cluster.gateway.prewarm import Prewarm
from moonpool.cluster.gateway.served import Models
from moonpool.cluster.gateway.tenants.file import FollowedKeys
from moonpool.cluster.gateway.tenants.gate import Gate
from moonpool.cluster.gateway.tenants.guard import Guard
from moonpool.cluster.gateway.tenants.usage import TenantUsage
from moonpool.cluster.gateway.usage_log import UsageLog, require_writable
from moonpool.cluster.identity.exposure import console_wanted
from moonpool.cluster.identity.https import Https, https_of
from moonpool.cluster.listening import listening_socket
from moonpool.cluster.overview.told import RECENT
from moonpool.cluster.warming import count_prompts
from moonpool.core.config import Config, GatewayConfig
from moonpool.core.errors import ConfigError, NoPath
from moonpool.core.ids import MemberId, Role
from moonpool.core.lifetime import Lives
from moonpool.core.membership import Member, Peers, WorkerReport

_KEEP_ALIVE_S = 75  # idle connections of clients
_BACKLOG = 2_048
_TICKS_A_SECOND = 10  # as uvicorn counts them
_LOOK_S = 0.05  # at connections, while it leaves
_LAST_WORDS_S = 2  # for error events to reach their clients once generations were ended


class _Server(uvicorn.Server):
    """Runs in our loop; signals belong to the process shell."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Once a second, for the date in answers; uvicorn's own wakes up ten times, to look whether it is to end."""
        tick = 0
        while not await self.on_tick(tick):
            tick = (tick + _TICKS_A_SECOND) % (_TICKS_A_SECOND * 86_400)
            try:
                async with asyncio.timeout(1.0):
                    await self._ending.wait()
            except TimeoutError:
                pass

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """Implements ``core.membership.Service``. Build it with ``start``."""

    def __init__(
        self,
        config: Config,
        server: _Server,
        listener: socket.socket,
        endpoints: Endpoints,
        models: Models,
        streams: DecodeStreams,
        https: Https | None,
        metrics: Metrics,
        connections: Connections,
    ) -> None:
        self._config = config
        self._models = models
        self._metrics = metrics
        self._connections = connections
        self.registry = metrics.registry
        self._server = server
        self._endpoints = endpoints
        self._streams = streams
        self._https = https
        self._prewarm: Prewarm | None = None
        self._console: Console | None = None
        self.url = f"{'https' if https else 'http'}://{_reachable(config)}:{listener.getsockname()[1]}"
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    @classmethod
    async def start(cls, config: Config, member: Member, peers: Peers, hash_key: bytes, model_dir: Path) -> Gateway:
        """Serving when it returns. ConfigError: the port is taken, or the model directory lacks what a gateway needs."""
        gate = _gate(config, peers)
        listener = _listen(config.gateway)
        streams = DecodeStreams(peers)
        try:
            https = https_of(config.security)
            if config.gateway.warm_file:
                count_prompts(Path(config.gateway.warm_file))
            if config.gateway.usage_log:
                require_writable(Path(config.gateway.usage_log))
            models = await Models.load(config, model_dir, peers, streams, hash_key)
        except BaseException:
            listener.close()
            await streams.close()
            raise
        metrics = Metrics([model.name for model in models.all])
        endpoints = Endpoints(config, models, metrics, gate, TenantUsage(metrics.registry))
        endpoints.accounts = _accounts(config.gateway, member.id)
        console = Console(config.cluster.name, member, peers, endpoints) if console_wanted(config) else None
        routers = [console_router(console, config)] if console else []
        app = build_app(endpoints, models, metrics=metrics.page, routers=routers)
        connections = Connections(_connection_limits(config.gateway))
        settings = uvicorn.Config(
            Goodbye(_with_origins(Guard(app, gate), config.gateway.cors_origins), lambda: endpoints.leaving),
            http=connections.protocol(),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_context_factory=(lambda *_: https.context) if https else None,
        )
        server = _Server(settings)
        gateway = cls(config, server, listener, endpoints, models, streams, https, metrics, connections)
        gateway._console = console
        await gateway._server.listening.wait()
        if config.gateway.warm_file:
            gateway._prewarm = Prewarm(models, config.model_name, gate.caller_named)
            gateway._prewarm.begin(Path(config.gateway.warm_file))
        return gateway

    def numbers(self) -> dict[str, float]:
        conductors = [one.conductors for one in self._models.all]
        return {
            "requests_in_flight": float(self._endpoints.in_flight),
            "decode_streams": float(len(self._streams)),
            "placing": float(sum(one.waiting for one in conductors)),
            "waiting_at_conductors": float(sum(one.queued for one in conductors)),
            "conductors_passed_over": float(sum(one.passed_over for one in conductors)),
            "workers_avoided": float(sum(one.avoided for one in conductors)),
            "models_without_path": float(len(self._models.lacking())),
            "connections": float(len(self._server.server_state.connections)),
            "metrics_failed_count": float(self._metrics.errors),
            "held_body_bytes": float(self._endpoints.held_bytes),
            **self._connections.numbers(),
            **(self._endpoints.accounts.numbers() if self._endpoints.accounts else {}),
        }

    def missing(self) -> list[str]:
        """Roles without which no request can be served, of whichever model."""
        return [role.value for role in self._models.missing()]

    def words(self) -> dict[str, str]:
        lacking = ", ".join(one.name for one in self._models.lacking())
        recent = self._endpoints.recent.word(asyncio.get_running_loop().time())
        words = {"url": self.url, "model": ", ".join(one.name for one in self._models.all), RECENT: recent}
        return words | ({"models_without_path": lacking} if lacking else {})

    @property
    def lifetimes(self) -> Lives:
        """Of the choices that ended here."""
        return self._endpoints.lifetimes

    def report(self) -> WorkerReport | None:
        return None

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, let running ones finish for ``limit_s``, and idle connections hear that they end.

        A client may be about to send its next request: for ``gateway.linger_ms`` it still gets an answer to it, which says
        ``Connection: close``. Who sends nothing until then is closed with nothing in flight.
        """
        self._endpoints.leaving = True
        now = asyncio.get_running_loop().time
        end, linger = now() + limit_s, now() + min(self._config.gateway.linger_ms / 1000, limit_s)
        while (left := end - now()) > 0:
            await self._endpoints.drain(left)
            if now() >= linger or not self._server.server_state.connections:
                return
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """What still runs ends with an error; then the server and everything behind it goes."""
        self._endpoints.leaving = True
        if self._prewarm:
            await self._prewarm.close()
        self._endpoints.end_all(NoPath("gateway: leaving; ask again", retry_after_s=RETRY_AFTER_S))
        self._server.end()
        await self._serving
        if self._console:
            await self._console.close()
        await self._streams.close()
        await self._models.close()
        if self._endpoints.accounts:
            await asyncio.to_thread(self._endpoints.accounts.log.close)
        if self._https:
            await self._https.close()


def _gate(config: Config, peers: Peers) -> Gate:
    """ConfigError where there is a file of keys and it is not good."""
    file = config.security.api_keys_file
    return Gate(FollowedKeys(Path(file)) if file else None, lambda: len(peers.live(Role.GATEWAY)))


def _accounts(gateway: GatewayConfig, member: MemberId) -> Accounts | None:
    if not gateway.usage_log:
        return None
    log = UsageLog(Path(gateway.usage_log), limit=gateway.usage_log_bytes, keep=gateway.usage_log_files)
    return Accounts(log, member, asyncio.get_running_loop().time)


def _with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Pages of ``origins`` may call: their preflights are answered before any key is asked for."""
    if not origins:
        return app
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["*"])


def _reachable(config: Config) -> str:
    """The host to put in a URL: where all addresses are bound, the one this cluster's processes announce."""
    host = config.gateway.host
    if host in ("0.0.0.0", "::"):
        host = config.cluster.host
    return f"[{host}]" if ":" in host else host


def _connection_limits(gateway: GatewayConfig) -> ConnectionLimits:
    return ConnectionLimits(gateway.max_connections, gateway.head_ms / 1000, gateway.slow_reader_ms / 1000)


def _listen(gateway: GatewayConfig) -> socket.socket:
    try:
        return listening_socket(gateway.host, gateway.port)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"gateway.port: {gateway.port} is taken on {gateway.host}; stop what listens there or set another gateway.port",
                param="gateway.port",
            ) from e
        raise ConfigError(
            f"gateway.host: cannot bind {gateway.host}:{gateway.port}: {e.strerror}; set another gateway.host or gateway.port",
            param="gateway.host",
        ) from e
