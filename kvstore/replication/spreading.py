"""Copies by heat: a prefix that other nodes read often gets another copy, before they have to wait for this node."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moonpool.kvstore.replication.heat import Heat
from moonpool.kvstore.replication.others import Others
from moonpool.kvstore.replication.plan import most_room, path_to

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

WAITING = 16  # hot prefixes that wait for their copy; what is hot still comes again
BYTES_PER_S = 256 << 20  # one copy at a time, at most this fast on average
COPY_S = 10.0  # one copy takes no longer
PIECE = 32  # blocks between two looks at the clock


class Spreader:
    """Event-loop only. ``read`` is cheap and never waits: copies are made by one task beside the serving."""

    def __init__(self, node: StoreNode, reads_per_minute: int) -> None:
        """``reads_per_minute`` of one block by other nodes make another copy; 0: never."""
        self._node = node
        self._reads = reads_per_minute
        self._others = Others(node)
        self._heat = Heat()
        self._hot: deque[bytes] = deque(maxlen=WAITING)  # the last block of each hot prefix
        self._task: asyncio.Task[None] | None = None
        self.copies = 0
        self.bytes = 0

    def numbers(self) -> dict[str, float]:
        return {"heat_copies": self.copies, "heat_bytes": self.bytes, "heat_blocks": len(self._heat)}

    def read(self, keys: Sequence[bytes]) -> None:
        """Another node asked for ``keys``, which follow one another: those that are here count."""
        if not self._reads:
            return
        now = self._node.clock()
        keys = keys[: self._node.pool.lookup(keys)]
        self._heat.read(keys, now)
        hot = self._heat.hot(keys, self._reads, now)
        if not hot or keys[hot - 1] in self._hot:
            return
        self._hot.append(keys[hot - 1])
        if self._task is None or self._task.done():
            self._task = self._node.spawn(self._run())

    async def _run(self) -> None:
        while self._hot:
            await self._spread(self._hot.popleft())

    async def _spread(self, last: bytes) -> None:
        path = self._path(last)
        if not path:
            return
        self._heat.forget(path)
        known = self._node.pool.held.index.get(last)
        if known is None:
            return
        layout = known.layout
        sizes = dict.fromkeys(path, layout.slot_bytes)
        to = most_room(await self._others.rooms(path), path, sizes)
        if to is None:
            return
        self.copies += 1
        for end in range(PIECE, len(path) + PIECE, PIECE):
            blocks, moved = await self._others.replicate(to, path[:end], layout, known.use, COPY_S)
            self.bytes += moved
            await asyncio.sleep(moved / BYTES_PER_S)
            if blocks < min(end, len(path)):
                return

    def _path(self, last: bytes) -> tuple[bytes, ...]:
        index = self._node.pool.held.index
        parents: dict[bytes, bytes | None] = {}
        at: bytes | None = last
        while at is not None and at not in parents and (entry := index.get(at)) is not None:
            parents[at] = entry.parent
            at = entry.parent
        return path_to(last, parents)
