"""Threads that may get stuck. A call on a network file system can hang for minutes and cannot be cancelled, so nobody
waits for one: it is given up, its thread is short of one until it returns, and what it then says is dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
WAITING_PER_THREAD = 64  # operations that may queue; more are refused at once


@dataclass(eq=False)
class Op(Generic[T]):
    """``work`` runs in a thread; ``OSError`` is its only failure. Buffers of others are touched only inside ``touching``."""

    work: Callable[[Op[T]], T]
    future: asyncio.Future[T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _given_up: bool = False

    def touching(self, copy: Callable[[], None]) -> bool:
        """Run a short copy from or to somebody else's buffer; False, and it did not run, once the operation was given up."""
        with self._lock:
            if not self._given_up:
                copy()
            return not self._given_up

    @property
    def wanted(self) -> bool:
        return not self._given_up

    def give_up(self) -> None:
        """From the return of this on no thread touches the operation's buffers; waits for a copy that goes on."""
        with self._lock:
            self._given_up = True
        self.future.cancel()


class Crew:
    """Event-loop only."""

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = threads * (1 + WAITING_PER_THREAD)
        self._queue: queue.SimpleQueue[Op[object] | None] = queue.SimpleQueue()
        self.outstanding = 0  # handed to the threads and not returned, given up or not
        self._closed = False
        self._threads = [threading.Thread(target=self._serve, name=f"store shared {i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Op[T]], T]) -> Op[T] | None:
        """None where too much is under way already, or the crew is closed."""
        if self.outstanding >= self._limit or self._closed:
            return None
        op: Op[T] = Op(work)
        self.outstanding += 1
        self._queue.put(op)  # type: ignore[arg-type]
        return op

    async def settle(self, ops: Sequence[Op[T]], deadline_s: float) -> None:
        """Until all are done or ``deadline_s`` seconds went by; those not done then are given up. The same on cancellation."""
        try:
            if ops:
                await asyncio.wait([op.future for op in ops], timeout=deadline_s)
        finally:
            for op in ops:
                if not op.future.done():
                    op.give_up()

    def _serve(self) -> None:
        while (op := self._queue.get()) is not None:
            tell: Callable[[], None]
            try:
                if not op.wanted:
                    tell = self._drop(op)
                else:
                    result = op.work(op)
                    tell = lambda f=op.future, r=result: f.done() or f.set_result(r)  # type: ignore[misc]  # noqa: E731
            except Exception as e:  # noqa: BLE001 - OSError is the store's; anything else is a bug, raised where it is awaited
                tell = lambda f=op.future, e=e: f.done() or f.set_exception(e)  # type: ignore[misc]  # noqa: E731
            self._tell(tell)

    @staticmethod
    def _drop(op: Op[object]) -> Callable[[], None]:
        return lambda: None

    def _tell(self, tell: Callable[[], None]) -> None:
        def on_loop() -> None:
            self.outstanding -= 1
            tell()

        try:
            self._loop.call_soon_threadsafe(on_loop)
        except RuntimeError:
            pass  # the loop was closed while this thread was stuck

    async def close(self, patience_s: float) -> int:
        """Ends the threads; returns how many are stuck still after ``patience_s``. They hold nobody's exit up."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        until = self._loop.time() + patience_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(until - self._loop.time(), 0.0))
        await asyncio.sleep(0)  # what the threads told the loop last
        return sum(thread.is_alive() for thread in self._threads)
