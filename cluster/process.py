"""The shell that every role runs in, whoever started it: gRPC face, registry session, reports, fences, an orderly end."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moonpool import __version__
from moonpool.cluster.admin import Admin, Lived, process_numbers
from moonpool.cluster.face import Face
from moonpool.cluster.identity.folders import take
from moonpool.cluster.identity.told import own_certificate
from moonpool.cluster.incarnations import Incarnations
from moonpool.cluster.leaving import budget_s, drain
from moonpool.cluster.logs import log_path, open_log
from moonpool.cluster.membership import Membership
from moonpool.cluster.probe.ended import EndedLives
from moonpool.cluster.probe.facts import Phase
from moonpool.cluster.probe.probe import Probe
from moonpool.cluster.reporter import Reporter
from moonpool.cluster.role_switch import checked_role, keep_role
from moonpool.cluster.spec import RoleSpec
from moonpool.cluster.tracing.make import traces_of
from moonpool.core.errors import Busy, MoonpoolError
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, Member, Service, WorkerReport
from moonpool.wire.status import being_cancelled

if TYPE_CHECKING:
    from moonpool.cluster.tracing.spans import Spans

EXIT_STOPPED = 0
EXIT_BAD_START = 2  # it cannot start: with a configuration that never worked here, starting again will not help
READY = "ready at "  # how the line begins that says that it serves
EXIT_FENCED = 75
EXIT_STUCK = 77  # it stood still with work pending, and nobody else ended it
EXIT_LOST = 78  # a process that computes with it has ended
EXIT_RESTART = 76  # it left in order, and whoever keeps it starts it anew
CLOSE_S = 10.0  # an orderly end takes no longer than this
COME_BACK_S = 20.0
TRACES_S = 3.0  # for the last spans to reach a collector

Say = Callable[[str], None]
Again = Callable[[Member], Awaitable[tuple[Service, Member]]]


@dataclass(slots=True)
class Made:
    """A started service, and the member completed with what loading found out.

    ``again`` starts the service anew for a newer life of this process (in the role that its member says), keeping what
    took long to load; None where the service holds neither slots nor pins and simply goes on. ``after``: what to free once
    the service closed for good. ``leave``: what the service does for the others before it closes for good; it bounds its
    own time. ``lost`` has a result, why, once the service can never do its work again: the process ends at once.
    """

    service: Service
    member: Member
    again: Again | None = None
    after: list[Callable[[], None]] = field(default_factory=list)
    leave: Callable[[Service], Awaitable[None]] | None = None
    lost: Future[str] | None = None


class BetweenLives:
    """Stands for a service that is over while the next one starts."""

    def numbers(self) -> dict[str, float]:
        return {}

    def words(self) -> dict[str, str]:
        return {}

    def report(self) -> WorkerReport | None:
        return None

    async def close(self) -> None:
        pass


Make = Callable[[RoleSpec, Member, Membership, Say], Awaitable[Made]]


class Process:
    """One member's process. ``say`` takes short progress lines; ``die`` ends the process at once."""

    def __init__(self, spec: RoleSpec, make: Make, say: Say, die: Callable[[int], None] = os._exit) -> None:
        self.spec, self._make, self._say, self._die = spec, make, say, die
        self._log = open_log(spec.state_dir, spec.member, spec.config.observe)
        self._lives = EndedLives(lambda: self._member.role, log_each=spec.config.observe.log_requests)
        self._traces: Spans | None = None
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._made: Made | None = None
        self._face: Face | None = None
        self._peers: Membership | None = None
        self._reporter: Reporter | None = None
        self._return: asyncio.Task[None] | None = None
        self._switching: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # a life that begins has begun before it is ended: others may hear of it earlier
        self._closing = False
        self._joined = False
        self._probe: Probe | None = None
        self._incarnations = Incarnations(spec.state_dir, spec.member)
        life = self._incarnations.next()
        self._member = Member(spec.member, spec.role, spec.node, life, "", os.getpid(), ready=False, version=__version__)

    async def start(self) -> None:
        """Loads, serves, joins; returns when ready. MoonpoolError where it cannot be."""
        take(self.spec.config, self.spec.member)
        self._traces = self._lives.traces = traces_of(self.spec.config.observe, self.spec.config.cluster.name, self.spec.member)
        self._probe = self._open_probe()
        face = self._open_face()
        group = "" if self.spec.role is Role.GATEWAY else self.spec.config.model_name
        self._peers = Membership(self.spec.registry, self.spec.config.timing, self._fenced, group)
        self._made = await self._make(self.spec, self._member, self._peers, self._say)
        details = {**self._made.member.details, "probe": self._probe.address}
        self._member = replace(self._made.member, details=details)
        async with self._turn:
            await self._serve(face, self._made.service, self._peers)
        if self._made.lost is not None:
            self._made.lost.add_done_callback(self._lost)
        self._say(f"{READY}{self._member.address}")

    def stop(self, code: int = EXIT_STOPPED) -> None:
        """Asks for the end; the first one's exit code counts."""
        if not self._ended.done():
            self._ended.set_result(code)
            self._refresh()

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
        """Leaves in order: no new work, the service's own end, the registry, the server. ``CLOSE_S`` after it has left."""
        self._log.info("closing")
        self._closing = True
        self._refresh()
        for change in (self._return, self._switching):
            if change:
                await asyncio.wait({change})
        self._member = replace(self._member, ready=False)
        if self._peers:
            self._peers.update(self._member)
        await self._leave()
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._made:
                    await self._end_service(self._made)
                    for free in self._made.after:
                        free()
                if self._peers:
                    await self._peers.leave()
                if self._face:
                    await self._face.stop(0.5)
        except TimeoutError:
            self._log.error("close took too long", limit_s=CLOSE_S)
        if self._probe:
            await self._probe.close()
        if self._traces:
            await asyncio.wait({asyncio.create_task(asyncio.to_thread(self._traces.close))}, timeout=TRACES_S)
        self._log.info("closed")

    async def _leave(self) -> None:
        """While others still reach this process: what its service does for them. Whatever goes wrong, the end follows."""
        try:
            if self._made and self._made.leave:
                await self._made.leave(self._made.service)
            elif self._made:
                await drain(self._made.service, budget_s(self.spec.config, self._member.role))
        except Exception as e:  # noqa: BLE001  an end that does not come is worse
            self._log.error("left without order", exc_info=e)

    # one life

    def _open_probe(self) -> Probe:
        cluster = self.spec.config.cluster
        return Probe(
            cluster.probe_host,
            cluster.probe_port,
            self.spec.config.timing.stuck_after_ms / 1e3,
            member=lambda: self._member,
            phase=self._phase,
            service=lambda: self._made.service if self._made else None,
            numbers=self._numbers,
            on_dead=self._dead,
            lives=self._lives,
        )

    def _dead(self, why: str) -> None:
        """Nothing in it helps any more: whoever keeps it starts it anew. In the probe's thread."""
        self._log.error("stands still; ends itself", why=why)
        self._die(EXIT_STUCK)

    def _lost(self, lost: Future[str]) -> None:
        """What it needs is gone: whoever keeps it starts it anew. In whatever thread found out."""
        self._log.error("cannot do its work any more; ends itself", why=lost.result())
        self._die(EXIT_LOST)

    def _phase(self) -> Phase:
        if self._closing or self._ended.done():
            return Phase.LEAVING
        if not self._joined:
            return Phase.STARTING
        return Phase.SERVING if self._member.ready else Phase.CHANGING

    def _refresh(self) -> None:
        if self._probe:
            self._probe.refresh()

    def _numbers(self) -> dict[str, float]:
        numbers = {**process_numbers(), **own_certificate()[0], "incarnation": float(self._member.incarnation)}
        numbers.update(self._peers.numbers() if self._peers else {})
        numbers.update(self._made.service.numbers() if self._made else {})
        numbers.update(self._traces.numbers() if self._traces else {})
        return numbers

    def _open_face(self) -> Face:
        admin = Admin(
            lambda: self._member,
            lambda: self._made.service if self._made else None,
            self._report,
            self.stop,
            lambda: self.stop(EXIT_RESTART),
            lambda: self._peers.numbers() if self._peers else {},
            self.switch,
            lambda term: self._peers.terms.check(term) if self._peers else None,
        )
        self._face = Face(self.spec.config.cluster.host, self.spec.config.cluster.port, admin)
        self._member = replace(self._member, address=self._face.address)
        return self._face

    async def _serve(self, face: Face, service: Service, peers: Membership) -> None:
        await face.start(service)
        if isinstance(service, Lived):
            self._lives.follow(service.lifetimes)
        self._member = replace(self._member, ready=True)
        await peers.join(self._member)
        self._joined = True
        await face.set_serving(True)
        self._reporter = Reporter(service, peers)
        self._log.info("ready", address=self._member.address, incarnation=self._member.incarnation)

    async def _report(self) -> None:
        if self._reporter:
            await self._reporter.report()

    async def _end_service(self, made: Made) -> None:
        if self._face:
            await self._face.set_serving(False)
        if self._reporter:
            await self._reporter.close()
            self._reporter = None
        await made.service.close()

    # fences

    def _fenced(self, why: str, replaced: bool) -> None:
        """This life is over. ``replaced``: another process has the name; otherwise this one may come back as a newer life."""
        self._log.error("fenced", why=why, replaced=replaced)
        if self._closing:  # nothing of its is in flight any more, and what it still has to put away is its own
            return
        self._say(f"fenced: {why}")
        if replaced and self._peers and (taken := self._peers.get(self.spec.member)) and taken.liveness is not Liveness.LIVE:
            self._incarnations.heard(taken.member.incarnation)  # not by a process that lives, but by a clock that was ahead
        if replaced or self._switching or self._made is None or self._peers is None:
            self._die(EXIT_FENCED)
            return
        self._return = asyncio.create_task(self._come_back(self._made, self._peers), name="process-come-back")

    async def _come_back(self, made: Made, peers: Membership) -> None:
        """Drops everything that the fenced life held, and joins as a newer one; ends the process where that fails."""
        try:
            async with asyncio.timeout(COME_BACK_S), self._turn:
                self._member = replace(self._member, incarnation=self._incarnations.next(), ready=False)
                if made.again:
                    await self._live_again(made, made.again, peers)
                else:
                    self._member = replace(self._member, ready=True)
                    await peers.join(self._member)
        except (Exception, asyncio.CancelledError) as e:
            if being_cancelled():
                raise
            self._log.error("cannot come back", exc_info=e)
            self._die(EXIT_FENCED)
            return
        self._say(f"back as life {self._member.incarnation}")

    async def _live_again(self, made: Made, again: Again, peers: Membership) -> None:
        await self._end_service(made)
        if self._face:
            await self._face.stop(0)
        made.service = BetweenLives()
        face = self._open_face()
        gc.collect()  # the old life hangs in cycles, and a pool's memory with it, which the new one may need
        made.service, self._member = await again(self._member)
        await self._serve(face, made.service, peers)

    # another role

    def switch(self, role: str, drain_s: float = 0.0) -> None:
        """Begins to drain, for ``drain_s`` at most (0: as long as a request may take), then leaves and comes back in ``role``.

        Busy while it starts, ends or switches already; InvalidRequest where it has no other role.
        """
        made, peers, to = self._made, self._peers, checked_role(role, self._member)
        unready = not self._member.ready or self._switching is not None or self._ended.done()
        if made is None or made.again is None or peers is None or unready:
            raise Busy(f"{self.spec.member} is not ready: it starts, ends or switches already", peer=self.spec.member)
        work = self._switch(made, made.again, peers, to, drain_s or self.spec.config.timing.request_budget_ms / 1e3)
        self._switching = asyncio.create_task(work, name="process-switch")

    async def _switch(self, made: Made, again: Again, peers: Membership, role: Role, drain_s: float) -> None:
        self._member = replace(self._member, ready=False)
        peers.update(self._member)
        self._say(f"draining, to come back as {role.value}")
        if not await drain(made.service, drain_s, self._ended):
            return
        self._log.info("switching role", role=role.value)
        try:
            async with asyncio.timeout(COME_BACK_S), self._turn:
                await asyncio.to_thread(keep_role, self.spec.state_dir, self.spec.member, role)
                self._member = replace(self._member, role=role, incarnation=self._incarnations.next())
                await self._live_again(made, again, peers)
        except (Exception, asyncio.CancelledError) as e:
            if being_cancelled():
                raise
            self._log.error("cannot switch", role=role.value, exc_info=e)
            self._die(EXIT_FENCED)
            return
        self._switching = None
        self._say(f"back as {role.value}, life {self._member.incarnation}")


def _in_one_line(spec: RoleSpec, error: BaseException) -> str:
    """Why a process cannot start, in one line; what we did not raise on purpose leaves its traceback in the log."""
    known = isinstance(error, MoonpoolError)
    text = error.message if isinstance(error, MoonpoolError) else f"{type(error).__name__}: {error}"
    open_log(spec.state_dir, spec.member, spec.config.observe).error(
        "start failed", exc_info=None if known else error, message=text
    )
    return text if known else f"{text} (traceback in {log_path(spec.state_dir, spec.member)})"
