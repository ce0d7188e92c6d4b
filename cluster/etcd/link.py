"""A process's side of membership in etcd: ``Core`` on a thread and event loop of its own.

So a busy event loop of the process does not lose the lease. The two loops speak by ``call_soon_threadsafe`` only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from moonpool.cluster.election import Lead
from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.core import LEAVE_S, Core
from moonpool.cluster.etcd.registration import OnFenced
from moonpool.core.config import TimingConfig
from moonpool.core.errors import NoPath
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.membership import Member, MemberChange

JOIN_S = 10.0


class EtcdLink:
    """Implements ``membership.Link``."""

    def __init__(self, registry: str, timing: TimingConfig, heard: Callable[[MemberChange], None], on_fenced: OnFenced) -> None:
        self._main = asyncio.get_running_loop()
        self._loop = asyncio.new_event_loop()
        self._core = Core(
            EtcdAddress.parse(registry),
            timing,
            lambda change: self._tell(heard, change),
            lambda why, replaced: self._tell(on_fenced, why, replaced),
        )
        self._thread = threading.Thread(target=self._run, name="membership-etcd", daemon=True)
        self._thread.start()

    async def join(self, member: Member) -> None:
        welcome: asyncio.Future[None] = self._main.create_future()
        self._call(self._begin, member, welcome)
        try:
            async with asyncio.timeout(JOIN_S):
                await welcome
        except TimeoutError as e:
            raise NoPath(
                f"registry: not registered at {self._core.address} in {JOIN_S:.0f} s ({self._core.trouble}); does etcd run?",
                retry_after_s=1.0,
            ) from e

    def update(self, member: Member) -> None:
        self._call(self._core.update, member)

    def report_gone(self, member: MemberId, incarnation: Incarnation, proof: str) -> None:
        self._call(self._core.report_gone, member, incarnation, proof)

    async def lead(self, member: Member, known: int, held: int) -> Lead | None:
        try:
            asking = asyncio.run_coroutine_threadsafe(self._core.lead(known), self._loop)
        except RuntimeError:  # that loop is closed: it has left
            return None
        return await asyncio.wrap_future(asking)

    async def leave(self) -> None:
        self._call(self._core.leave)
        await asyncio.to_thread(self._thread.join, 2 * LEAVE_S)

    def numbers(self) -> dict[str, float]:
        return self._core.numbers()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._core.run())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _begin(self, member: Member, welcome: asyncio.Future[None]) -> None:
        self._core.join(member).add_done_callback(lambda done: self._tell(_copy, done, welcome))

    def _call(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # left already
            pass

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._main.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the process's loop is closed: nobody to tell
            pass


def _copy(done: asyncio.Future[None], into: asyncio.Future[None]) -> None:
    """The outcome of a future of another loop."""
    error = None if done.cancelled() else done.exception()
    if into.done() or done.cancelled():
        return
    if error is not None:
        into.set_exception(error)
    else:
        into.set_result(None)
