"""Block events to subscribers: a snapshot, then numbered batches. A slow subscriber is cut off and comes again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId
from moonpool.wire.frames import encode_events, encode_snapshot

QUEUE = 256  # batches a subscriber may be behind
HISTORY = 256  # batches kept for subscribers that come back


class Watchers:
    """Event-loop only. All queues share the frames. ``snapshot`` is asked for with every event published so far."""

    def __init__(self, node: NodeId, incarnation: Incarnation, snapshot: Callable[[], IndexSnapshot]) -> None:
        self._node = node
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._next = 1  # number of the next event
        self._history: deque[tuple[int, bytes]] = deque(maxlen=HISTORY)  # (number after the batch, frame)
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self.cut = 0

    def __len__(self) -> int:
        return len(self._queues)

    def publish(self, batches: list[EventBatch]) -> None:
        for batch in batches:
            frame = encode_events(batch)
            self._next = batch.number + len(batch.events)
            self._history.append((self._next, frame))
            for queue in list(self._queues):
                if queue.full():
                    self._cut(queue)
                    self.cut += 1
                else:
                    queue.put_nowait(frame)

    def _cut(self, queue: asyncio.Queue[bytes | None]) -> None:
        """Nothing is kept for it: a frozen subscriber may never read again."""
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)

    def close(self) -> None:
        for queue in self._queues:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)

    async def frames(self, incarnation: int, next_number: int, idle_s: float) -> AsyncIterator[bytes]:
        """Frames for one subscriber, until it is cut off. It may go on after ``next_number - 1`` of this life, if kept.

        Every ``idle_s`` without news an empty batch names the number that comes next, so that a gap shows.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE)
        missed = self._missed(incarnation, next_number)
        first = [encode_snapshot(self._snapshot())] if missed is None else missed
        self._queues.add(queue)
        try:
            for frame in first:
                yield frame
            while True:
                try:
                    async with asyncio.timeout(idle_s):
                        item = await queue.get()
                except TimeoutError:
                    item = encode_events(EventBatch(self._node, self._incarnation, self._next, ()))
                if item is None:
                    return
                yield item
        finally:
            self._queues.discard(queue)

    def _missed(self, incarnation: int, next_number: int) -> list[bytes] | None:
        """What a returning subscriber missed; None: it needs a snapshot."""
        if incarnation != self._incarnation or not 0 < next_number <= self._next:
            return None
        if next_number == self._next:
            return []
        kept = [frame for after, frame in self._history if after > next_number]
        total = sum(after > next_number for after, _ in self._history)
        if total == len(self._history) and len(self._history) == HISTORY:
            return None  # older batches may be gone
        return kept
