"""A few threads that move bytes for the tier: reads before writes before moves, each within its own bandwidth.

Operations are submitted and settled on the event loop. One that a thread has begun is always waited for, since the
kernel may write its buffers until the call returns; one still queued can be given up at any time, and then nobody ever
touches its buffers. So a stalled disk delays at most the reads that are inside it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

from moonpool.kvstore.ssd.copying import Scratch
from moonpool.kvstore.transfer.throttle import TokenBucket

T = TypeVar("T")
QUEUE = 4096  # operations of one kind that may wait; more are given up at once
TURN = 8  # every so many operations the lowest kind goes first, so that none starves
SMOOTH = 0.2  # weight of the newest read in the expected time of the next


def spare_threads(calls: int) -> int:
    """How many check blocks while ``calls`` others are inside system calls."""
    return max(1, calls // 2)


class Kind(IntEnum):
    READ = 0
    WRITE = 1
    MOVE = 2


@dataclass(eq=False)
class Op(Generic[T]):
    """``work`` runs in a thread and raises nothing. The future's None means it was given up before it began."""

    kind: Kind
    size: int  # bytes
    work: Callable[[Scratch], T]
    until: float | None = None  # on the flow's clock; later than that it is not begun
    future: asyncio.Future[T | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    claimed: bool = False  # by a thread, or by whoever gave it up; under the flow's lock


class Flow:
    """Event-loop only. At most ``calls`` system calls run at once; ``spare`` further threads check blocks meanwhile.

    ``rates`` are bytes/s by kind; 0: no limit.
    """

    def __init__(self, calls: int, spare: int, rates: dict[Kind, float], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._buckets = {kind: TokenBucket(rates.get(kind, 0.0)) for kind in Kind}
        self._gates = dict.fromkeys(Kind, 0.0)  # before this instant the next operation of that kind may not begin
        self._queues: dict[Kind, deque[Op[object]]] = {kind: deque() for kind in Kind}
        lock = threading.Lock()
        self._ready = threading.Condition(lock)  # there is something to do
        self._room = threading.Condition(lock)  # a system call has ended
        self._calls = calls  # that may begin
        self._closed = False
        self._picked = 0
        self._pace = 0.0  # seconds a byte of a read takes, smoothed
        self.bytes: Counter[Kind] = Counter()  # of operations done
        self.busy = 0
        self._threads = [threading.Thread(target=self._serve, name=f"ssd {i}", daemon=True) for i in range(calls + spare)]
        for thread in self._threads:
            thread.start()

    def submit(self, op: Op[T]) -> None:
        with self._ready:
            queue = self._queues[op.kind]
            if len(queue) >= QUEUE:  # a stalled disk: what was given up meanwhile still lies here
                self._queues[op.kind] = queue = deque(waiting for waiting in queue if not waiting.claimed)
            if self._closed or len(queue) >= QUEUE:
                op.claimed = True
                op.future.set_result(None)
                return
            queue.append(op)  # type: ignore[arg-type]
            self._ready.notify()

    async def settle(self, ops: Sequence[Op[T]], until: float | None = None) -> list[T | None]:
        """Their results, in order. At ``until`` those not begun are given up; those begun are waited for.

        The same on cancellation, which is raised only when no thread touches any of their buffers.
        """
        timer = None
        if until is not None:
            timer = self._loop.call_later(max(0.0, until - self._clock()), self._give_up, ops)
        try:
            await asyncio.shield(_all(ops))
        except asyncio.CancelledError:
            self._give_up(ops)
            await _through(_all(ops))
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return [op.future.result() for op in ops]

    def queued(self) -> int:
        with self._ready:
            return sum(not op.claimed for queue in self._queues.values() for op in queue)

    def _give_up(self, ops: Sequence[Op[T]]) -> None:
        with self._ready:
            idle = [op for op in ops if not op.claimed]
            for op in idle:
                op.claimed = True
        for op in idle:
            op.future.set_result(None)

    # -- in the threads ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        scratch = Scratch(self)
        while (op := self._next(scratch)) is not None:
            begun = self._clock()
            try:
                try:
                    result = op.work(scratch)
                finally:
                    scratch.leave()
            except Exception as e:  # noqa: BLE001 - a bug: raised where the result is awaited
                self._done(op, begun, lambda f=op.future, e=e: f.set_exception(e))  # type: ignore[misc]
            else:
                self._done(op, begun, lambda f=op.future, r=result: f.set_result(r))  # type: ignore[misc]

    def _done(self, op: Op[object], begun: float, tell: Callable[[], None]) -> None:
        taken = self._clock() - begun
        with self._ready:
            self.busy -= 1
            self.bytes[op.kind] += op.size
            if op.kind is Kind.READ:
                pace = taken / max(op.size, 1)
                self._pace = pace if not self._pace else self._pace + SMOOTH * (pace - self._pace)
        self._loop.call_soon_threadsafe(tell)

    def enter(self) -> None:
        """A thread is about to call the system; waits while as many as may are inside."""
        with self._room:
            while not self._calls:
                self._room.wait()
            self._calls -= 1

    def leave(self) -> None:
        with self._room:
            self._calls += 1
            self._room.notify()
            self._ready.notify()

    def _next(self, scratch: Scratch) -> Op[object] | None:
        """Waits for work; None when the flow is closed. A read is taken only where its system call may begin at once:
        one that waits can still be given up.
        """
        with self._ready:
            while True:
                now = self._clock()
                kinds = self._open(now)
                if kinds:
                    op = self._queues[kinds[0]].popleft()
                    if op.claimed:
                        continue
                    op.claimed = True
                    if self._too_late(op, now):
                        self._loop.call_soon_threadsafe(op.future.set_result, None)
                        continue
                    self._gates[op.kind] = now + self._buckets[op.kind].take(op.size, now)
                    if op.kind is Kind.READ:
                        self._calls -= 1
                        scratch.inside = True
                    self._picked += 1
                    self.busy += 1
                    return op
                if self._closed:
                    return None
                self._ready.wait(self._pause(now))

    def _open(self, now: float) -> list[Kind]:
        """Kinds of which something may begin now, the one whose turn it is first."""
        kinds = [kind for kind in Kind if self._queues[kind] and (now >= self._gates[kind] or self._closed)]
        if not self._calls and Kind.READ in kinds:
            kinds.remove(Kind.READ)
        return kinds[::-1] if self._picked % TURN == TURN - 1 else kinds

    def _pause(self, now: float) -> float | None:
        waiting = [self._gates[kind] - now for kind in Kind if self._queues[kind] and now < self._gates[kind]]
        return min(waiting) if waiting else None

    def _too_late(self, op: Op[object], now: float) -> bool:
        if op.until is None or now + self._pace * op.size <= op.until:
            return False
        self._pace *= 1 - SMOOTH  # a pause of the disk must not be held against it for ever
        return True

    async def close(self) -> None:
        """Gives up what is queued, waits for what has begun, ends the threads."""
        with self._ready:
            self._closed = True
            left = [op for queue in self._queues.values() for op in queue if not op.claimed]
            for op in left:
                op.claimed = True
            self._ready.notify_all()
        for op in left:
            op.future.set_result(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        await asyncio.sleep(0)  # what the threads told the loop last


async def _all(ops: Sequence[Op[T]]) -> None:
    if ops:
        await asyncio.wait([op.future for op in ops])


async def _through(done: Coroutine[Any, Any, None]) -> None:
    """Await ``done`` however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(done)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
