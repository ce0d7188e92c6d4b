"""The probes of one process: ``/live``, ``/ready`` and ``/metrics`` on a small HTTP port, whatever the process is doing.

The process's own loop writes down how things stand several times a second; the server's thread reads that, so that an answer
never waits for a busy loop, and a loop that hangs is told by its silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol, runtime_checkable

import structlog
from prometheus_client import CollectorRegistry

from moonpool.cluster.probe.ended import EndedLives
from moonpool.cluster.probe.exposition import Exposition
from moonpool.cluster.probe.facts import Facts, Phase, live, ready
from moonpool.cluster.probe.server import Answer, ProbeServer
from moonpool.core.membership import Member
from moonpool.core.progress import Progress

TICK_S = 0.5
FRESH_S = 1.0  # a page of metrics waits this long for numbers of now, then tells the newest ones it has
log = structlog.get_logger(__name__)


@runtime_checkable
class GetsOn(Protocol):
    """A service with parts that can stand still by themselves."""

    def progress(self, now: float) -> list[Progress]: ...


@runtime_checkable
class NeedsOthers(Protocol):
    """A service that is of no use without certain other roles."""

    def missing(self) -> list[str]: ...


@runtime_checkable
class OwnMetrics(Protocol):
    """A service that keeps metrics of its own beside its numbers."""

    registry: CollectorRegistry


class Probe:
    """Made on the process's event loop before anything is loaded; ``close`` comes last."""

    def __init__(
        self,
        host: str,
        port: int,
        stuck_s: float,
        *,
        member: Callable[[], Member],
        phase: Callable[[], Phase],
        service: Callable[[], object],
        numbers: Callable[[], Mapping[str, float]],
        on_dead: Callable[[str], None],
        lives: EndedLives | None = None,
    ) -> None:
        """``on_dead`` (why) is called in the server's thread once the process was not alive for ``stuck_s`` on end.

        ``lives``: whose histograms stand on the page of metrics, too.
        """
        self._lives = lives
        self._stuck_s, self._on_dead = stuck_s, on_dead
        self._member, self._phase, self._service, self._read = member, phase, service, numbers
        self._loop = asyncio.get_running_loop()
        self._exposition = Exposition()
        self._facts, self._ticked = Facts(), time.monotonic()
        self._numbers: dict[str, float] = {}
        self._numbers_at = self._ticked
        self._asked: Future[None] | None = None
        self.errors = 0
        self._server = ProbeServer(host, port, self._respond, self._watch)
        self._ticking = asyncio.create_task(self._tick(), name="probe-tick")

    @property
    def address(self) -> str:
        return self._server.address

    def facts(self) -> Facts:
        """As of now, the process's own loop included. Any thread."""
        silent_s = max(0.0, time.monotonic() - self._ticked - 2 * TICK_S)
        loop = Progress("event loop", silent_s, self._stuck_s)
        return replace(self._facts, parts=(*self._facts.parts, loop))

    def refresh(self) -> None:
        """The phase changed: told at once, not at the next tick. On the process's loop."""
        self._ticked = time.monotonic()
        self._facts = self._look()

    async def close(self) -> None:
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await asyncio.to_thread(self._server.close)

    # on the process's loop

    async def _tick(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(TICK_S)

    def _look(self) -> Facts:
        service, parts, missing = self._service(), list[Progress](), list[str]()
        try:
            if isinstance(service, GetsOn):
                parts = service.progress(time.monotonic())
            if isinstance(service, NeedsOthers):
                missing = service.missing()
        except Exception as e:  # noqa: BLE001  a probe that fails must not take the process with it
            self._failed("state", e)
        return Facts(self._phase(), tuple(missing), tuple(parts))

    def _failed(self, what: str, error: Exception) -> None:
        self.errors += 1
        if self.errors in (1, 10, 100) or not self.errors % 1_000:
            log.warning("probe cannot read", what=what, times=self.errors, exc_info=error)

    async def _collect(self) -> None:
        try:
            self._numbers = dict(self._read())
            self._numbers_at = time.monotonic()
        except Exception as e:  # noqa: BLE001  what could not be read is told by its age
            self._failed("numbers", e)

    # in the server's thread

    async def _watch(self) -> None:
        """Counts its own ticks: a process that was stopped as a whole, and goes on, has not stood still by itself."""
        dead_s = 0.0
        while dead_s < self._stuck_s:
            await asyncio.sleep(TICK_S)
            dead_s = 0.0 if live(self.facts()).good else dead_s + TICK_S
        self._on_dead(live(self.facts()).words)

    async def _respond(self, path: str, accept: str) -> Answer:
        match path:
            case "/live":
                verdict = live(self.facts())
            case "/ready":
                verdict = ready(self.facts())
            case "/metrics":
                return await self._metrics(accept)
            case _:
                return Answer(404, b"/live, /ready and /metrics are here\n")
        return Answer(200 if verdict.good else 503, f"{verdict.words}\n".encode())

    async def _ask(self) -> None:
        """For numbers of now: one question at a time, given up while the loop is busy."""
        if self._asked is None or self._asked.done():
            collecting = self._collect()
            try:
                self._asked = asyncio.run_coroutine_threadsafe(collecting, self._loop)
            except RuntimeError:  # the loop has ended
                collecting.close()
                return
        await asyncio.wait({asyncio.wrap_future(self._asked)}, timeout=FRESH_S)

    async def _metrics(self, accept: str) -> Answer:
        await self._ask()
        facts = self.facts()
        numbers = {
            **self._numbers,
            "probe_live": float(live(facts).good),
            "probe_ready": float(ready(facts).good),
            "metrics_errors": float(self.errors + (self._lives.errors if self._lives else 0)),
            "metrics_age_seconds": time.monotonic() - self._numbers_at,
        }
        service = self._service()
        own = [service.registry] if isinstance(service, OwnMetrics) else []
        if self._lives is not None:
            own.append(self._lives.registry)
        try:
            body, kind = self._exposition.render(self._member(), numbers, own, accept)
        except Exception as e:  # noqa: BLE001  metrics of the service's own may be broken; its numbers are still told
            self._failed("page", e)
            body, kind = self._exposition.render(self._member(), numbers, [], accept)
        return Answer(200, body, kind)
