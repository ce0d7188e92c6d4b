"""UCXX (two-sided UCX) for one thread: its workers, and waiting for them in the kernel.

The optional package ``ucxx-cu12`` is needed. Its blocking progress mode is used: workers are armed, then their descriptors
are polled together with one for calls from other threads. Everything goes by tags, pieces straight into their place: a
receive by tag ends with its endpoint, while a stream's that still waits would keep the endpoint's sockets for ever.

The receiver gives every connection a number in a welcome (tag ``WELCOME_TAG``); the sender's messages carry it in the upper
half of their tags, with ``CONTROL`` or the piece's own number in the lower one. Answers come with ``ANSWER_TAG``: a sender
has a worker of its own for every target.
"""

from __future__ import annotations

import gc
import os
import queue
import select
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError, TransferFailed
from moonpool.kvstore.transfer import tcp_wire
from moonpool.kvstore.transfer.ucx import ucx_environment

T = TypeVar("T")
HELLO_BYTES = tcp_wire.HELLO.size + 256  # the name is padded
WELCOME = struct.Struct("<4sHI")  # magic, version, number of the connection
CONTROL = 0xFFFF_FFFF
WELCOME_TAG, ANSWER_TAG = 1, 2
SETTLE_S = 0.3  # for requests to end after their endpoint was closed
LOOK_S = 1.0  # at most this long without a look at the workers: a descriptor may miss an event
log = structlog.get_logger(__name__)


class Worker:
    """A UCX worker and its endpoints. To end it is a fence: nothing moves any more, in either direction."""

    def __init__(self, api: Any, context: Any) -> None:
        self.ucx: Any = api.UCXWorker(context)
        self.ucx.init_blocking_progress_mode()
        self.endpoints: list[Any] = []

    def close(self, endpoint: Any) -> None:
        """Its requests end. The caller keeps no reference to it."""
        self.endpoints.remove(endpoint)
        try:
            endpoint.close_blocking(period=10_000_000, max_attempts=10)
        except Exception as e:  # noqa: BLE001 its exceptions share no base that is public
            log.info("ucxx_close", error=f"{type(e).__name__}: {e}")

    def end(self, *requests: Requests) -> None:
        """``requests`` are what may still be on its way: until they have ended, UCX keeps the worker (but nothing moves)."""
        while self.endpoints:
            self.close(self.endpoints[-1])
        until = time.monotonic() + SETTLE_S
        while not all(one.settled() for one in requests) and time.monotonic() < until:
            self.ucx.progress()
            time.sleep(0.001)
        if not all(one.settled() for one in requests):
            log.warning("ucxx_left_behind", requests=sum(len(one) for one in requests))
        self.ucx = None
        gc.collect()  # cycles must not keep the worker, nor its sockets


class UcxxThread:
    """Runs calls on its thread, and ``advance`` after each turn of the workers.

    ``advance`` returns how many seconds it can wait (0: call again at once).
    """

    def __init__(self, name: str, config: TransferConfig, advance: Callable[[], float]) -> None:
        self.api: Any = None  # ucxx's low-level module, once begun
        self._workers: list[Worker] = []
        self._config = config
        self._advance = advance
        self._context: Any = None
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """``work`` on the thread; its result or exception as a future."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as e:  # noqa: BLE001 the caller gets whatever it is
                done.set_exception(e)

        with self._lock:
            if not self._stopping:
                self._calls.put(run)
                os.eventfd_write(self._wake, 1)
                return done
        done.set_exception(TransferFailed("this end is closed"))
        return done

    def stop(self, last: Callable[[], None]) -> None:
        """Blocks until ``last`` has run on the thread and that is gone. Again is a no-op."""
        self.call(last).exception()
        with self._lock:
            first, self._stopping = not self._stopping, True
            if first:
                os.eventfd_write(self._wake, 1)
        self._thread.join()
        if first:
            os.close(self._wake)

    # Below: on the thread.

    def worker(self) -> Worker:
        """A new one. ConfigError without the package."""
        if self._context is None:
            os.environ.update(ucx_environment(self._config, os.environ))
            try:
                from ucxx._lib import libucxx as api
            except ImportError as e:
                message = f"transfer.carrier: 'ucxx' needs the package ucxx-cu12, install moonpool[ucxx] ({e})"
                raise ConfigError(message, param="transfer.carrier") from e
            self.api = api
            self._context = api.UCXContext({}, (api.Feature.TAG, api.Feature.WAKEUP))
        made = Worker(self.api, self._context)
        self._workers.append(made)
        return made

    def end(self, worker: Worker, *requests: Requests) -> None:
        self._workers.remove(worker)
        worker.end(*requests)

    def array(self, data: Any) -> Any:
        from ucxx._lib.arr import Array

        return Array(data)

    def send(self, requests: Requests, endpoint: Any, data: NDArray[np.uint8], tag: int) -> None:
        requests.add(endpoint.tag_send(self.array(data), self.api.UCXXTag(tag)), data)

    def receive(self, requests: Requests, endpoint: Any, into: NDArray[np.uint8], tag: int) -> None:
        requests.add(endpoint.tag_recv(self.array(into), self.api.UCXXTag(tag)), into)

    def _run(self) -> None:
        while not self._stopping:
            self._take_calls()
            for worker in self._workers:
                worker.ucx.progress()
            wait_s = min(self._advance(), LOOK_S)
            if wait_s > 0 and all(worker.ucx.arm() for worker in self._workers):
                self._wait(wait_s)
        self._context = None
        gc.collect()

    def _wait(self, wait_s: float) -> None:
        poll = select.poll()
        for descriptor in (self._wake, *(worker.ucx.epoll_file_descriptor for worker in self._workers)):
            poll.register(descriptor, select.POLLIN)
        poll.poll(wait_s * 1e3)

    def _take_calls(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        try:
            while True:
                self._calls.get_nowait()()
        except queue.Empty:
            return


class Requests:
    """Requests on their way, with the memory they use."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []

    def add(self, request: Any, memory: Any) -> None:
        self._open.append((request, memory))

    def ended(self) -> bool:
        """Whether all have. Raises what UCXX raises where one failed."""
        while self._open and self._open[0][0].completed:
            self._open.pop(0)[0].check_error()
        return not self._open

    def settled(self) -> bool:
        """Whether none of them uses its memory any more, however they ended."""
        return all(request.completed for request, _ in self._open)

    def __len__(self) -> int:
        return len(self._open)

    def clear(self) -> None:
        self._open.clear()


def empty(size: int) -> NDArray[np.uint8]:
    return np.zeros(size, dtype=np.uint8)


def copied(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8).copy()


def tag_of(connection: int, number: int) -> int:
    return connection << 32 | number
