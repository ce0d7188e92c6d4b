"""A process's side of the embedded registry (``cluster.registry``): one session that beats, one watch.

Heartbeats come from their own thread over a blocking channel: they go on while the event loop is busy. The watch runs on
the event loop. Both reconnect with back-off.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import structlog

from moonpool.cluster.election import Lead
from moonpool.core.config import TimingConfig
from moonpool.core.errors import ConfigError, LayoutMismatch, NoPath
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb
from moonpool.wire.channels import dial, dial_blocking
from moonpool.wire.convert import from_wire, to_wire
from moonpool.wire.status import being_cancelled, why_unreachable

OnFenced = Callable[[str, bool], None]  # why, and whether another process took the name
BACKOFF_S = (0.1, 2.0)
STEADY_S = 5.0  # a session that lasted this long begins the back-off anew
LEAD_S = 1.0  # to be answered whether this conductor leads
log = structlog.get_logger(__name__)


class RegistryLink:
    """Implements ``membership.Link``. ``heard`` gets every change, on the event loop."""

    def __init__(self, registry: str, timing: TimingConfig, heard: Callable[[MemberChange], None], on_fenced: OnFenced) -> None:
        self._registry, self._timing = registry, timing
        self._heard, self._on_fenced = heard, on_fenced
        self._live: dict[MemberId, Member] = {}
        self._channel = dial(registry)
        self._stub = pb.registry_rpc.RegistryStub(self._channel)
        self._watcher = asyncio.create_task(self._watch(), name="membership-watch")
        self._session: _Session | None = None
        self._reports: set[asyncio.Task[None]] = set()

    async def join(self, member: Member) -> None:
        if self._session:  # of an older life: fenced, or it ends now
            await asyncio.to_thread(self._session.leave)
        welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = _Session(self._registry, self._timing, member, welcome, self._on_fenced)
        try:
            await asyncio.wait_for(asyncio.shield(welcome), 10.0)
        except TimeoutError as e:
            raise NoPath(
                f"registry: no answer from {self._registry} within 10 s ({self._session.trouble}); is it running?",
                retry_after_s=1.0,
            ) from e

    def update(self, member: Member) -> None:
        if self._session:
            self._session.update(member)

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        report = asyncio.create_task(self._report_gone(member, incarnation, proof), name="membership-report-gone")
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        message = pb.registry.GoneReport(member=member, incarnation=incarnation, proof=proof)
        try:
            await self._stub.ReportGone(message, timeout=2.0)
        except grpc.aio.AioRpcError:
            pass

    async def lead(self, member: Member, known: int, held: int) -> Lead | None:
        request = pb.registry.LeadRequest(member=member.id, incarnation=member.incarnation, known_term=known, held_term=held)
        try:
            said = await self._stub.Lead(request, timeout=LEAD_S)
        except grpc.aio.AioRpcError:
            return None
        return Lead(MemberId(said.leader) or None, Incarnation(said.incarnation), said.term, said.lease_ms / 1000)

    async def leave(self) -> None:
        if self._session:
            await asyncio.to_thread(self._session.leave)
        self._watcher.cancel()
        await asyncio.gather(self._watcher, *self._reports, return_exceptions=True)
        await self._channel.close()

    def numbers(self) -> dict[str, float]:
        return {}

    # the watch

    async def _watch(self) -> None:
        delays = _backoff()
        while True:
            forget: asyncio.TimerHandle | None = None
            try:
                watch = self._stub.Watch(pb.types.Empty(), wait_for_ready=True)
                await watch.initial_metadata()  # while nobody answers the last known view stays, however long
                unheard = dict(self._live)
                forget = asyncio.get_running_loop().call_later(self._timing.registry_return_ms / 1000, self._forget, unheard)
                async for message in watch:
                    delays = _backoff()
                    change = from_wire(message, MemberChange)
                    unheard.pop(change.member.id, None)
                    self._tell(change)
            except grpc.aio.AioRpcError:
                pass
            except asyncio.CancelledError:
                if being_cancelled():
                    raise  # otherwise its channel gave way to one with a newer certificate
            except Exception as e:  # one change that cannot be taken in must not be the last one heard of
                log.warning("watch of the registry broke", registry=self._registry, exc_info=e)
            finally:
                if forget:
                    forget.cancel()
            await asyncio.sleep(next(delays))

    def _tell(self, change: MemberChange) -> None:
        if change.liveness is Liveness.LIVE:
            self._live[change.member.id] = change.member
        else:
            self._live.pop(change.member.id, None)
        self._heard(change)

    def _forget(self, unheard: dict[MemberId, Member]) -> None:
        for member in unheard.values():
            self._tell(MemberChange(member, Liveness.SILENT, "unknown to the registry"))


class _Session:
    """The thread that joins and beats. Speaks to the event loop by ``call_soon_threadsafe`` only."""

    def __init__(
        self,
        registry: str,
        timing: TimingConfig,
        member: Member,
        welcome: asyncio.Future[None],
        on_fenced: OnFenced,
    ) -> None:
        self._registry, self._beat_s = registry, timing.heartbeat_ms / 1000
        self._member, self._welcome, self._on_fenced = member, welcome, on_fenced
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._news = True  # ``member`` has not been sent on this stream yet
        self._leaving = False
        self.trouble = "it says nothing"
        self._thread = threading.Thread(target=self._run, name="membership-beat", daemon=True)
        self._thread.start()

    def update(self, member: Member) -> None:
        with self._wake:
            self._member, self._news = member, True
            self._wake.notify_all()

    def leave(self) -> None:
        with self._wake:
            self._leaving = True
            self._wake.notify_all()
        self._thread.join(timeout=5.0)

    def _beats(self, ended: threading.Event) -> Iterator[pb.registry.MemberBeat]:
        """Read by a grpc thread; its end half-closes the stream."""
        while not ended.is_set():
            with self._wake:
                if not self._news and not self._leaving:
                    self._wake.wait(self._beat_s)
                news, self._news = self._news, False
                member, leaving = self._member, self._leaving
            if ended.is_set():
                return
            beat = pb.registry.MemberBeat(incarnation=member.incarnation, leaving=leaving)
            if news:
                to_wire(member, beat.member)
            yield beat
            if leaving:
                return

    def _run(self) -> None:
        delays = _backoff()
        while not self._leaving:
            began = time.monotonic()
            if self._one_stream():
                return
            if time.monotonic() > began + STEADY_S:
                delays = _backoff()
            with self._wake:
                self._news = True
                self._wake.wait_for(lambda: self._leaving, next(delays))

    def _one_stream(self) -> bool:
        """One stream's life; True when the session is over for good."""
        ended = threading.Event()
        with dial_blocking(self._registry) as channel:
            try:
                for message in pb.registry_rpc.RegistryStub(channel).Join(self._beats(ended)):
                    if message.HasField("welcome"):
                        self._tell(_set_result, self._welcome)
                    elif message.HasField("fenced"):
                        if not message.replaced:  # it was welcome, and its life is over before that was heard
                            self._tell(_set_result, self._welcome)
                        self._tell(self._on_fenced, message.fenced, message.replaced)
                        return True
            except grpc.RpcError as e:
                if e.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._tell(_set_exception, self._welcome, LayoutMismatch(e.details()))
                    return True
                if e.code() is grpc.StatusCode.PERMISSION_DENIED:
                    refused = ConfigError(f"security.tls: {self._registry} refused: {e.details()}", param="security.tls")
                    self._tell(_set_exception, self._welcome, refused)
                    return True
                self.trouble = why_unreachable(e.details())
            finally:
                ended.set()
                with self._wake:
                    self._wake.notify_all()
        return self._leaving

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: nobody to tell
            pass


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _backoff() -> Iterator[float]:
    """0.1 s doubling to 2 s, each with jitter: members must not come back in step."""
    delay, most = BACKOFF_S
    while True:
        yield delay * random.uniform(0.5, 1.0)
        delay = min(2 * delay, most)
