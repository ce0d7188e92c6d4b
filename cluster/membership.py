"""A process's session with the registry, and the cluster as it sees it.

Heartbeats come from their own thread over a blocking channel: they go on while the event loop is busy. The watch runs
on the event loop, which alone touches the view. Both reconnect with back-off; while the registry is away the last known
view stays.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator

import grpc

from moonpool.core.config import TimingConfig
from moonpool.core.errors import LayoutMismatch, NoPath
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire

OnFenced = Callable[[str, bool], None]  # why, and whether another process took the name
BACKOFF_S = (0.1, 2.0)
UNKNOWN_AFTER_S = 5.0  # a registry that came back empty has heard everybody who lives by then


class Membership:
    """Implements ``core.membership.Peers``. ``on_fenced`` is called on the event loop: this life is over."""

    def __init__(self, registry: str, timing: TimingConfig, on_fenced: OnFenced) -> None:
        self._registry = registry
        self._timing = timing
        self._on_fenced = on_fenced
        self._view: dict[MemberId, MemberChange] = {}
        self._subscribers: list[Callable[[MemberChange], None]] = []
        self._changed = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(registry)
        self._stub = pb.registry_rpc.RegistryStub(self._channel)
        self._watcher = asyncio.create_task(self._watch(), name="membership-watch")
        self._session: _Session | None = None
        self._reports: set[asyncio.Task[None]] = set()

    # Peers

    def get(self, member: MemberId) -> MemberChange | None:
        return self._view.get(member)

    def live(self, role: Role) -> list[Member]:
        found = [c.member for c in self._view.values() if c.liveness is Liveness.LIVE and c.member.role is role]
        return sorted(found, key=lambda m: m.id)

    def store_of(self, node: NodeId) -> Member | None:
        return next((m for m in self.live(Role.STORE) if m.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        for change in list(self._view.values()):
            on_change(change)
        self._subscribers.append(on_change)

        def stop() -> None:
            if on_change in self._subscribers:
                self._subscribers.remove(on_change)

        return stop

    # the session

    def everybody(self) -> list[MemberChange]:
        return sorted(self._view.values(), key=lambda c: c.member.id)

    async def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits until ``condition`` holds, looking after every change. NoPath naming ``what`` when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as e:
            raise NoPath(f"no {what} within {timeout_s:.0f} s (registry {self._registry})", retry_after_s=1.0) from e

    async def join(self, member: Member) -> None:
        """Opens the session; returns once welcome. LayoutMismatch as the registry says it; NoPath after 10 s without it."""
        welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._session = _Session(self._registry, self._timing, member, welcome, self._on_fenced)
        try:
            await asyncio.wait_for(asyncio.shield(welcome), 10.0)
        except TimeoutError as e:
            raise NoPath(f"registry: no answer from {self._registry} within 10 s; is it running?", retry_after_s=1.0) from e

    def update(self, member: Member) -> None:
        """New words about this life (``ready``, details); sent with the next beat, at once."""
        if self._session:
            self._session.update(member)

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        """A host's agent proves a death. Best effort: without a registry nobody is asking."""
        report = asyncio.create_task(self._report_gone(member, incarnation, proof), name="membership-report-gone")
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        message = pb.registry.GoneReport(member=member, incarnation=incarnation, proof=proof)
        try:
            await self._stub.ReportGone(message, timeout=2.0)
        except grpc.aio.AioRpcError:
            pass

    async def leave(self) -> None:
        """Ends the session in order (the registry then knows this life as gone) and the watch."""
        if self._session:
            await asyncio.to_thread(self._session.leave)
        self._watcher.cancel()
        await asyncio.gather(self._watcher, *self._reports, return_exceptions=True)
        await self._channel.close()

    # the view

    async def _watch(self) -> None:
        delays = _backoff()
        while True:
            heard: set[MemberId] = set()
            forget = asyncio.get_running_loop().call_later(UNKNOWN_AFTER_S, self._forget_unheard, heard)
            try:
                async for message in self._stub.Watch(pb.types.Empty(), wait_for_ready=True):
                    delays = _backoff()
                    change = from_wire(message, MemberChange)
                    heard.add(change.member.id)
                    self._apply(change)
            except grpc.aio.AioRpcError:
                pass
            finally:
                forget.cancel()
            await asyncio.sleep(next(delays))

    def _apply(self, change: MemberChange) -> None:
        known = self._view.get(change.member.id)
        if known == change or (known and known.member.incarnation > change.member.incarnation):
            return
        self._view[change.member.id] = change
        self._changed.set()
        for subscriber in list(self._subscribers):
            subscriber(change)

    def _forget_unheard(self, heard: set[MemberId]) -> None:
        for member, change in list(self._view.items()):
            if member not in heard and change.liveness is Liveness.LIVE:
                self._apply(MemberChange(change.member, Liveness.SILENT, "unknown to the registry"))


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
            if self._one_stream():
                return
            with self._wake:
                self._news = True
                self._wake.wait_for(lambda: self._leaving, next(delays))

    def _one_stream(self) -> bool:
        """One stream's life; True when the session is over for good."""
        ended = threading.Event()
        with grpc.insecure_channel(self._registry) as channel:
            try:
                for message in pb.registry_rpc.RegistryStub(channel).Join(self._beats(ended)):
                    if message.HasField("welcome"):
                        self._tell(_set_result, self._welcome)
                    elif message.HasField("fenced"):
                        self._tell(self._on_fenced, message.fenced, message.replaced)
                        return True
            except grpc.RpcError as e:
                if e.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._tell(_set_exception, self._welcome, LayoutMismatch(e.details()))
                    return True
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
