"""The receiving end over UCX: registered regions, and one thread that polls while landings are open.

Over TCP a peer's bytes are written into the regions by this thread's own polling, so a receiver that does not poll
receives nothing, and destroying the agent is a proof: nothing that was posted to it can land any more. Deregistering
alone is none, and unmapping memory under a writer would kill this process.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import Bug, TransferFailed
from moonpool.core.landing import Region
from moonpool.core.membership import Member
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer import ucx
from moonpool.kvstore.transfer.carrier import UNKNOWN, Endpoint, OnNotices

T = TypeVar("T")
log = structlog.get_logger(__name__)


class UcxReceiver:
    """See ``carrier.Receiver``. The agent is made by the thread; the first one of a process takes about 0.5 s."""

    carrier = "ucx"

    def __init__(
        self, member: Member, config: TransferConfig, on_notices: OnNotices, *, new_agent: ucx.NewAgent = ucx.new_agent
    ) -> None:
        self._member = member
        self._config = config
        self._new_agent = new_agent
        self._on_notices = on_notices
        self._regions: tuple[Region, ...] = ()
        self._views: tuple[NDArray[np.uint8], ...] = ()
        self._endpoint: Endpoint | None = None
        self._agent: Any = None
        self._registered: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._transport = UNKNOWN
        self._opened = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ucx-receive", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # an interpreter that ends under the thread would end in an abort

    def register(self, regions: Sequence[Region], views: Sequence[NDArray[np.uint8]]) -> None:
        """Blocks while the agent is made."""
        if self._endpoint is not None or len(regions) != len(views):
            raise Bug("register: once, with one view per region")
        self._regions, self._views = tuple(regions), tuple(views)
        self._call(self._begin).result()

    def describe(self, writer: Life | None = None) -> Endpoint:
        if self._endpoint is None:
            raise Bug("describe: no regions are registered")
        return self._endpoint

    def open(self) -> None:
        with self._lock:
            self._opened += 1
        self._calls.put(lambda: None)  # wakes the thread

    def idle(self) -> None:
        with self._lock:
            if self._opened == 0:
                raise Bug("idle: more often than open")
            self._opened -= 1

    async def remake(self) -> Endpoint:
        return await asyncio.wrap_future(self._call(self._remake))

    async def cut(self, writer: Life) -> bool:
        """UCX applies the writes of all peers together: only destroying the agent stops one."""
        return False

    def numbers(self) -> dict[str, float]:
        return {}

    def transport_used(self) -> str:
        return self._transport

    def close(self) -> None:
        if not self._stopping:
            self._call(self._end).exception()
        self._thread.join()
        atexit.unregister(self.close)

    # Below: on the thread.

    def _call(self, work: Callable[[], T]) -> Future[T]:
        """``work`` on the thread; its result or exception as a future."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as e:  # noqa: BLE001 the caller gets whatever it is
                done.set_exception(e)

        if self._stopping:
            done.set_exception(TransferFailed("the receiving end is closed"))
        else:
            self._calls.put(run)
        return done

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._calls.get(timeout=ucx.RECEIVE_POLL_S if self._opened and self._agent is not None else None)()
            except queue.Empty:
                pass
            if self._opened and self._agent is not None:
                self._poll()

    def _poll(self) -> None:
        try:
            arrived = self._agent.get_new_notifs()
        except self._errors as e:
            log.warning("ucx_poll", error=f"{type(e).__name__}: {e}")
            return
        frames = [frame for frames in arrived.values() for frame in frames if frame]
        if not frames:
            return
        if self._transport == UNKNOWN:
            self._transport = ucx.lanes_used(self._agent.name)
        try:
            self._on_notices(frames)
        except Exception:
            log.exception("notices_not_taken", frames=len(frames))

    def _begin(self) -> Endpoint:
        generation = 1 if self._endpoint is None else self._endpoint.generation + 1
        name = ucx.agent_name(self._member.id, self._member.incarnation, "r", generation)
        self._agent = self._new_agent(name, self._config)
        self._errors = ucx.nixl_errors()
        bases = tuple(int(view.ctypes.data) for view in self._views)
        if bases:
            wanted = [(base, view.size, 0, "") for base, view in zip(bases, self._views, strict=True)]
            try:
                self._registered = self._agent.register_memory(wanted, "DRAM")
            except self._errors as e:
                self._destroy()
                raise TransferFailed(f"UCX could not register the regions ({type(e).__name__}: {e})") from e
        self._endpoint = Endpoint(
            node=self._member.node,
            incarnation=self._member.incarnation,
            generation=generation,
            carrier=self.carrier,
            agent_name=name,
            metadata=self._agent.get_agent_metadata(),
            bases=bases,
            regions=self._regions,
        )
        return self._endpoint

    def _destroy(self) -> None:
        if self._agent is None:
            return
        if self._registered is not None:
            try:
                self._agent.deregister_memory(self._registered)
            except self._errors as e:
                log.warning("ucx_deregister", error=f"{type(e).__name__}: {e}")
        self._agent = self._registered = None
        ucx.collect_agent()

    def _remake(self) -> Endpoint:
        if self._agent is not None:
            self._poll()  # what has arrived counts
        self._destroy()
        try:
            return self._begin()
        except TransferFailed as e:
            log.warning("ucx_agent", error=e.message)
            return self._begin()

    def _end(self) -> None:
        self._stopping = True
        self._destroy()
