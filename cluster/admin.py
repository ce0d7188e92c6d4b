"""The admin service that every process answers, beside gRPC health: gauges, dropping cached pages, stopping."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

import grpc
import psutil

from moonpool.cluster.identity.told import own_certificate
from moonpool.core.errors import MoonpoolError
from moonpool.core.lifetime import Lives, lives_json
from moonpool.core.membership import Member, Service
from moonpool.wire import pb
from moonpool.wire.convert import to_wire

LIVES_PER_REPLY = 1_024


@runtime_checkable
class DevicePages(Protocol):
    """A service that holds device pages."""

    async def clear_device_pages(self) -> int:
        """Drops cached pages that nobody uses; returns how many."""


@runtime_checkable
class Lived(Protocol):
    """A service that remembers the instants of requests that ended in it."""

    lifetimes: Lives


class Admin(pb.admin_rpc.AdminServicer):
    """``service`` is None while the process loads. ``report`` tells the conductors how things stand now.

    ``membership``: gauges of this process's side of the registry. ``stop`` and ``restart`` begin its end; ``switch`` (role,
    seconds to drain) begins a change of role, or raises why it cannot; ``check_term`` raises where
    the term that it is asked in is over.
    """

    def __init__(
        self,
        member: Callable[[], Member],
        service: Callable[[], Service | None],
        report: Callable[[], Awaitable[None]],
        stop: Callable[[], None],
        restart: Callable[[], None],
        membership: Callable[[], dict[str, float]],
        switch: Callable[[str, float], None],
        check_term: Callable[[int], None] = lambda term: None,
    ) -> None:
        self._member, self._service, self._report = member, service, report
        self._stop, self._restart = stop, restart
        self._membership, self._switch, self._check_term = membership, switch, check_term

    async def Stats(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.admin.AdminStats:
        service = self._service()
        stats = pb.admin.AdminStats()
        to_wire(self._member(), stats.member)
        stats.numbers.update(process_numbers())
        stats.numbers.update(self._membership())
        numbers, words = own_certificate()
        stats.numbers.update(numbers)
        stats.words.update(words)
        if service is not None:
            stats.numbers.update(service.numbers())
            stats.words.update(service.words())
        return stats

    async def ClearDevicePages(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.admin.AdminStats:
        service: object = self._service()
        if isinstance(service, DevicePages):
            await service.clear_device_pages()
            await self._report()  # a prompt that comes next must not be placed by pages that are gone
        return await self.Stats(request, context)

    async def Lives(self, request: pb.admin.LivesRequest, context: grpc.aio.ServicerContext) -> pb.admin.LivesReply:
        service: object = self._service()
        if not isinstance(service, Lived):
            return pb.admin.LivesReply(next=0, json="[]")
        if request.request:
            found = [(request.request, attempt, life) for attempt, life in service.lifetimes.of(request.request)]
            return pb.admin.LivesReply(json=lives_json(found[-LIVES_PER_REPLY:]))
        number, told = service.lifetimes.since(request.after, LIVES_PER_REPLY)
        return pb.admin.LivesReply(next=number, json=told)

    async def Stop(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        self._stop()
        return pb.types.Empty()

    async def Restart(self, request: pb.types.Empty, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        self._restart()
        return pb.types.Empty()

    async def SwitchRole(self, request: pb.admin.SwitchRoleRequest, context: grpc.aio.ServicerContext) -> pb.types.Empty:
        try:
            self._check_term(request.term)
            self._switch(request.role, request.drain_ms / 1e3)
        except MoonpoolError as e:
            await context.abort(grpc.StatusCode[e.grpc_status], e.message)
        return pb.types.Empty()


def process_numbers() -> dict[str, float]:
    """Threads, file descriptors, sockets and resident bytes of this process."""
    handles = sockets = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            handles += 1
        except OSError:  # closed meanwhile
            continue
    with open("/proc/self/statm", encoding="ascii") as f:
        pages = int(f.read().split()[1])
    return {
        "process_threads": float(len(os.listdir("/proc/self/task"))),
        "process_python_threads": float(threading.active_count()),
        "process_handles": float(handles),
        "process_sockets": float(sockets),
        "process_resident_bytes": float(pages * os.sysconf("SC_PAGE_SIZE")),
        "process_start_time_seconds": psutil.Process().create_time(),
    }
