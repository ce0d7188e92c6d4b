"""The sending end over UCX: the thread that owns its agent, and the calls that reach it."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.device_memory import DeviceMemory
from moonpool.core.errors import MoonpoolError, TransferFailed
from moonpool.core.membership import Member
from moonpool.kvstore.transfer import ucx
from moonpool.kvstore.transfer.carrier import Endpoint, Pieces
from moonpool.kvstore.transfer.pieces import memory_extents
from moonpool.kvstore.transfer.ucx_wire import UcxWire, Write

log = structlog.get_logger(__name__)


class UcxSender:
    """See ``carrier.Sender``. A target that takes no bytes for ``stall_s`` is given up (``PeerSilent``)."""

    carrier = "ucx"

    def __init__(
        self, member: Member, config: TransferConfig, *, stall_s: float = 5.0, new_agent: ucx.NewAgent = ucx.new_agent
    ) -> None:
        self._wire = UcxWire(member, config, stall_s, new_agent)
        self._closed: MoonpoolError | None = None
        self._lock = threading.Lock()  # nothing is queued after the thread has left
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ucx-send", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # an interpreter that ends under the thread would end in an abort

    def read_from(self, memory: DeviceMemory) -> None:
        self._submit(lambda: self._wire.read_from(memory))

    def register(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        memory_extents(memories)  # a wrong shape is the caller's to hear
        self._submit(lambda: self._wire.begin(memories))

    def connect(self, target: Endpoint) -> Future[None]:
        done: Future[None] = Future()
        self._submit(lambda: self._wire.connect(target, done), done)
        return done

    def push(self, target: Endpoint, pieces: Pieces, frame: bytes) -> Future[None]:
        write = Write(pieces, frame, Future())
        self._submit(lambda: self._wire.accept(target, write), write.future)
        return write.future

    def forget(self, target: Endpoint) -> None:
        self._submit(lambda: self._wire.forget(target))

    def bytes_sent(self) -> int:
        return self._wire.sent

    def transport_used(self) -> str:
        return self._wire.transport + self._wire.read

    def close(self) -> None:
        self._close(TransferFailed("the sending end is closed"))
        self._thread.join()
        atexit.unregister(self.close)

    def _submit(self, call: Callable[[], None], future: Future[None] | None = None) -> None:
        with self._lock:
            if self._closed is None:
                self._calls.put(call)
                return
        if future is not None:
            future.set_exception(self._closed)

    def _close(self, why: MoonpoolError) -> None:
        with self._lock:
            if self._closed is None:
                self._closed = why
                self._calls.put(lambda: self._wire.refuse_waiting(why))

    # Below: on the thread.

    def _run(self) -> None:
        try:
            while self._closed is None or self._wire.busy():
                self._take_calls()
                self._wire.step(time.monotonic())
        except Exception as e:
            log.exception("ucx_send_ended")
            self._close(e if isinstance(e, MoonpoolError) else TransferFailed(f"sending end: {type(e).__name__}: {e}"))
        self._take_waiting()
        self._wire.refuse_waiting(self._closed or TransferFailed("the sending end is closed"))
        self._wire.end()

    def _take_calls(self) -> None:
        """Run what was asked, waiting for it only while nothing here needs attention."""
        wait: float | None = ucx.SEND_POLL_S
        if not self._wire.busy():
            due = self._wire.next_due()
            wait = None if due is None else max(due - time.monotonic(), 0.0)
        try:
            self._calls.get(timeout=wait)()
        except queue.Empty:
            return
        self._take_waiting()

    def _take_waiting(self) -> None:
        try:
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            return
