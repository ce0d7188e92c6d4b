"""One process's whole traffic with etcd: a connection at a time, on it the watch, the registration and the reports."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator

from moonpool.cluster.election import Lead
from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Book
from moonpool.cluster.etcd.client import Away, Etcd, LeaseLost
from moonpool.cluster.etcd.login import Login
from moonpool.cluster.etcd.records import over
from moonpool.cluster.etcd.registration import OnFenced, Registration, end_life
from moonpool.cluster.etcd.trust import Trust
from moonpool.cluster.etcd.watch import Watch
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.membership import Liveness, Member, MemberChange

FIRST_PAUSE_S = 0.5
STEADY_S = 5.0  # a connection that lasted this long begins the back-off anew
LEAVE_S = 2.0
MAX_REPORTS = 1_024


class Core:
    """Lives on one event loop, ``heard`` and ``on_fenced`` are called there. ``attempts`` counts connections."""

    def __init__(
        self, address: EtcdAddress, timing: TimingConfig, heard: Callable[[MemberChange], None], on_fenced: OnFenced
    ) -> None:
        self.address = address
        beat_s = timing.heartbeat_ms / 1000
        self._book = Book(address)
        return_s = timing.registry_return_ms / 1000
        self._longest_pause_s = return_s / 2
        self._trust = Trust(gap_s=max(4 * beat_s, 0.5), grace_s=return_s)
        self._registration = Registration(address, math.ceil(timing.silent_after_ms / 1000), on_fenced)
        self._watch = Watch(address, self._book, self._trust, beat_s, return_s / 2, heard, self._looked)
        self._reports: dict[tuple[MemberId, Incarnation], str] = {}
        self._reported = asyncio.Event()
        self._leaving = asyncio.Event()
        self._etcd: Etcd | None = None  # while connected
        self.attempts = 0
        self.trouble = "no answer yet"
        self.connected = False

    def join(self, member: Member) -> asyncio.Future[None]:
        return self._registration.begin(member)

    def update(self, member: Member) -> None:
        self._registration.update(member)

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        """Kept until it is written, for a proof is said once; the oldest ones give way."""
        if len(self._reports) >= MAX_REPORTS:
            del self._reports[next(iter(self._reports))]
        self._reports[member, incarnation] = proof
        self._reported.set()

    async def lead(self, known: int) -> Lead | None:
        """Whether this process leads, as in ``membership.Link``."""
        if self._etcd is None:
            return None
        try:
            return await self._registration.lead(self._etcd, known)
        except (Away, LeaseLost):
            return None

    def leave(self) -> None:
        self._leaving.set()

    def numbers(self) -> dict[str, float]:
        return {
            "registry_connected": float(self.connected),
            "registry_attempts": float(self.attempts),
            "registry_presumed_silent": float(self._registration.presumed_silent),
            "registry_refused_values": float(self._book.refused),
        }

    async def run(self) -> None:
        """Until ``leave``. One endpoint after the other, with full jitter: those that lost etcd together come back apart."""
        delays = _backoff(self._longest_pause_s)
        for endpoint in itertools.cycle(self.address.endpoints):
            began = time.monotonic()
            await self._connection(endpoint)
            if self._leaving.is_set():
                return
            if time.monotonic() - began > STEADY_S:
                delays = _backoff(self._longest_pause_s)
            try:
                async with asyncio.timeout(next(delays)):
                    await self._leaving.wait()
            except TimeoutError:
                pass

    async def _connection(self, endpoint: str) -> None:
        self.attempts += 1
        try:
            login = Login.read(self.address)
        except ConfigError as e:  # the files are read anew at every connection: they may be good again
            self.trouble = e.message
            return
        etcd = Etcd(endpoint, lambda: self._trust.answered(time.monotonic()), login)
        try:
            await self._connected(etcd)
        except* (Away, LeaseLost) as e:
            self.trouble = f"{endpoint}: {e.exceptions[0]}"
        except* _Left:
            pass
        except* Exception as e:  # noqa: BLE001  a bug here must not end the membership of a process that serves
            asyncio.get_running_loop().call_exception_handler({"message": "membership: connection ended", "exception": e})
        finally:
            self.connected, self._etcd = False, None
            self._trust.lost()
            etcd.close()

    async def _connected(self, etcd: Etcd) -> None:
        async with asyncio.TaskGroup() as tasks:
            revision = await self._watch.begin(etcd)
            self.connected, self._etcd = True, etcd
            tasks.create_task(self._watch.follow(etcd, revision), name="etcd-follow")
            tasks.create_task(self._watch.reread(etcd), name="etcd-reread")
            tasks.create_task(self._watch.judge(etcd), name="etcd-judge")
            keep = tasks.create_task(self._registration.keep(etcd), name="etcd-keep")
            tasks.create_task(self._report(etcd), name="etcd-report")
            await self._leaving.wait()
            keep.cancel()
            await asyncio.wait({keep})
            await self._say_goodbye(etcd)
            raise _Left

    async def _say_goodbye(self, etcd: Etcd) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._registration.leave(etcd)
        except (TimeoutError, LeaseLost):
            pass

    async def _report(self, etcd: Etcd) -> None:
        while True:
            self._reported.clear()
            for (member, incarnation), proof in list(self._reports.items()):
                record = self._book.record(member)
                if record is None or record.change.member.incarnation < incarnation:
                    continue  # a life that is not known yet
                if record.change.member.incarnation == incarnation:
                    await end_life(etcd, self.address, over(record.change.member, Liveness.GONE, proof))
                self._reports.pop((member, incarnation), None)
            await self._reported.wait()

    def _looked(self) -> None:
        self._registration.check(self._book)
        if self._reports:
            self._reported.set()


class _Left(Exception):
    """The way out of the task group."""


def _backoff(longest_s: float) -> Iterator[float]:
    """Exponential, with full jitter."""
    most = min(FIRST_PAUSE_S, longest_s)
    while True:
        yield random.uniform(0, most)
        most = min(2 * most, longest_s)
