"""Sends a worker's reports to every live conductor: about four times a second, and less often while it has nothing to say."""

from __future__ import annotations

import asyncio
import time

import grpc
import structlog

from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import Member, Peers, Service, WorkerReport
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import to_wire
from moonpool.wire.status import being_cancelled

PERIOD_S = 0.25
STILL_S = 1.0  # between two reports that say the same of a worker which does nothing
log = structlog.get_logger(__name__)
TIMEOUT_S = 1.0  # a report that takes longer is stale: the next one says it better


class Reporter:
    """One task. A conductor that cannot be reached loses the timings of that report and nothing else."""

    def __init__(self, service: Service, peers: Peers) -> None:
        self._service, self._peers = service, peers
        self._channels: dict[MemberId, tuple[str, grpc.aio.Channel]] = {}
        self.failures = 0
        self._still: tuple[WorkerReport, list[Member]] | None = None  # told last, to whom, if nothing was going on
        self._told_at = 0.0
        self._task = asyncio.create_task(self._run(), name="reporter")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for _, channel in self._channels.values():
            await channel.close()

    async def report(self) -> None:
        """Tells every live conductor how things stand now."""
        self._still = None
        await self._look()

    async def _tell(self, report: WorkerReport, conductors: list[Member]) -> None:
        self._still = None if busy(report) else (report, conductors)
        self._told_at = time.monotonic()
        message = to_wire(report, pb.types.WorkerReport())
        await asyncio.gather(*(self._send(c.id, c.address, message) for c in conductors))

    async def _look(self) -> None:
        """Tells them, unless the same conductors have heard the same lately."""
        conductors = self._peers.live(Role.CONDUCTOR)
        await self._drop_others({c.id: c.address for c in conductors})
        report = self._service.report() if conductors else None
        heard = time.monotonic() < self._told_at + STILL_S and (report, conductors) == self._still
        if report is not None and not heard:
            await self._tell(report, conductors)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self._look()
            except asyncio.CancelledError:
                if being_cancelled():
                    raise  # otherwise a channel was closed under it, by a report made beside this one
            except Exception as e:  # noqa: BLE001  a report that cannot be made is one report less, not the end of all
                self._failed(e)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures in (1, 10, 100) or not self.failures % 1_000:
            log.warning("no report", times=self.failures, exc_info=error)

    async def _send(self, conductor: MemberId, address: str, message: pb.types.WorkerReport) -> None:
        if conductor not in self._channels:
            self._channels[conductor] = (address, dial(address))
        try:
            await pb.conductor_rpc.ConductorStub(self._channels[conductor][1]).Report(message, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            pass

    async def _drop_others(self, addresses: dict[MemberId, str]) -> None:
        for conductor, (address, channel) in list(self._channels.items()):
            if addresses.get(conductor) != address:
                del self._channels[conductor]
                await channel.close()


def busy(report: WorkerReport) -> bool:
    """It tells of something that happens, or that a conductor has to hear once."""
    return bool(report.attempts or report.prefills or report.steps or report.g1_frames or report.links)
