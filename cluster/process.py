"""The shell that every role runs in, whoever started it: gRPC server, admin and health, registry session, reports, end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from moonpool.cluster.admin import Admin
from moonpool.cluster.logs import log_path, open_log
from moonpool.cluster.membership import Membership
from moonpool.cluster.reporter import Reporter
from moonpool.cluster.spec import RoleSpec
from moonpool.core.errors import ConfigError, MoonpoolError
from moonpool.core.ids import Incarnation, Role
from moonpool.core.membership import Member, Service
from moonpool.wire import pb

EXIT_STOPPED = 0
EXIT_BAD_START = 2  # the configuration cannot work: starting again will not help
EXIT_FENCED = 75
CLOSE_S = 10.0  # an orderly end takes no longer than this
MAX_MESSAGE_BYTES = 64 << 20
HOLDS_NO_KV = frozenset({Role.CONDUCTOR, Role.GATEWAY})  # nothing of theirs to fence: they come back as a newer life

Say = Callable[[str], None]


@runtime_checkable
class GrpcFace(Protocol):
    """A service that is spoken to by gRPC, on the process's one server."""

    def add_to(self, server: grpc.aio.Server) -> None: ...


@dataclass(slots=True)
class Made:
    """A started service, the member completed with what loading found out, and what to free after the service closed."""

    service: Service
    member: Member
    after: list[Callable[[], None]] = field(default_factory=list)


Make = Callable[[RoleSpec, Member, Membership, Say], Awaitable[Made]]


class Process:
    """One life of one member. ``say`` takes short progress lines; ``die`` ends the process at once (a fenced life)."""

    def __init__(self, spec: RoleSpec, make: Make, say: Say, die: Callable[[int], None] = os._exit) -> None:
        self.spec, self._make, self._say, self._die = spec, make, say, die
        self._log = open_log(spec.state_dir, spec.member)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._made: Made | None = None
        self._peers: Membership | None = None
        self._reporter: Reporter | None = None
        self._rejoin: asyncio.Task[None] | None = None
        self._closing = False
        self._health = HealthServicer()
        self._server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        )
        self._member = Member(
            spec.member, spec.role, spec.node, Incarnation(time.time_ns()), address="", pid=os.getpid(), ready=False
        )

    async def start(self) -> None:
        """Serves, loads, joins; returns when ready. MoonpoolError where it cannot be."""
        spec = self.spec
        admin = Admin(lambda: self._member, lambda: self._made.service if self._made else None, self.stop)
        pb.admin_rpc.add_AdminServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._set_serving(False)
        self._member = replace(self._member, address=f"{spec.config.cluster.host}:{self._listen()}")
        self._peers = Membership(spec.registry, spec.config.timing, self._fenced)
        self._made = await self._make(spec, self._member, self._peers, self._say)
        if isinstance(self._made.service, GrpcFace):
            self._made.service.add_to(self._server)
        await self._server.start()
        self._member = replace(self._made.member, ready=True)
        await self._peers.join(self._member)
        await self._set_serving(True)
        self._reporter = Reporter(self._made.service, self._peers)
        self._log.info("ready", address=self._member.address, incarnation=self._member.incarnation)
        self._say(f"ready at {self._member.address}")

    def stop(self, code: int = EXIT_STOPPED) -> None:
        """Asks for the end; the first one's exit code counts."""
        if not self._ended.done():
            self._ended.set_result(code)

    async def live(self) -> tuple[int, str]:
        """Starts, stays until ``stop`` (also while it still starts), closes: (exit code, why it could not start)."""
        starting = asyncio.create_task(self.start(), name="process-start")
        first: set[asyncio.Future[Any]] = {starting, self._ended}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and (error := starting.exception()):
            await self.close()
            return EXIT_BAD_START, _in_one_line(self.spec, error)
        code = await self._ended
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await self.close()
        return code, ""

    async def close(self) -> None:
        """Leaves in order: no new work, the service's own end, the registry, the server. Bounded by ``CLOSE_S``."""
        self._log.info("closing")
        self._closing = True
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._set_serving(False)
                if self._peers:
                    self._peers.update(replace(self._member, ready=False))
                if self._rejoin:
                    await self._rejoin
                if self._reporter:
                    await self._reporter.close()
                if self._made:
                    await self._made.service.close()
                    for free in self._made.after:
                        free()
                if self._peers:
                    await self._peers.leave()
                await self._server.stop(grace=0.5)
        except TimeoutError:
            self._log.error("close took too long", limit_s=CLOSE_S)
        self._log.info("closed")

    def _listen(self) -> int:
        host = self.spec.config.cluster.host
        try:
            return int(self._server.add_insecure_port(f"{host}:0"))
        except RuntimeError as e:
            raise ConfigError(f"cluster.host: cannot listen on {host!r}; give an address of this machine") from e

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    def _fenced(self, why: str) -> None:
        """This life is over. Who holds slots or pins ends at once, with what is still in its sockets: no orderly close."""
        self._log.error("fenced", why=why)
        if self._closing:  # nothing of its is in flight any more, and what it still has to put away is its own
            return
        self._say(f"fenced: {why}")
        if self.spec.role not in HOLDS_NO_KV:
            self._die(EXIT_FENCED)
        self._rejoin = asyncio.create_task(self._come_back(), name="process-rejoin")

    async def _come_back(self) -> None:
        self._member = replace(self._member, incarnation=Incarnation(time.time_ns()))
        try:
            if self._peers:
                await self._peers.join(self._member)
        except MoonpoolError as e:
            self._log.error("cannot rejoin", why=e.message)
            self._die(EXIT_FENCED)


async def run_role(spec: RoleSpec, make: Make, say: Say, *, lifeline: int | None = None) -> int:
    """One process's whole life; returns its exit code. Ends on SIGTERM, SIGINT, ``Admin.Stop``.

    ``lifeline`` is a descriptor whose other end its launcher holds: the launcher's death is then a reason to stop, too.
    """
    os.environ.update({k: v for k, v in spec.environment().items() if k not in os.environ})
    process = Process(spec, make, say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop, 128 + number)
    if lifeline is not None:
        loop.add_reader(lifeline, _read_lifeline, lifeline, process)
    code, why = await process.live()
    if why:
        print(f"{spec.member}: {why}", file=sys.stderr, flush=True)
    return code


def _read_lifeline(lifeline: int, process: Process) -> None:
    if not os.read(lifeline, 4096):
        asyncio.get_running_loop().remove_reader(lifeline)
        process.stop()


def _in_one_line(spec: RoleSpec, error: BaseException) -> str:
    """Why a process cannot start, in one line; what we did not raise on purpose leaves its traceback in the log."""
    known = isinstance(error, MoonpoolError)
    text = error.message if isinstance(error, MoonpoolError) else f"{type(error).__name__}: {error}"
    open_log(spec.state_dir, spec.member).error("start failed", exc_info=None if known else error, message=text)
    return text if known else f"{text} (traceback in {log_path(spec.state_dir, spec.member)})"
