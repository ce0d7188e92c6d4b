"""A live stream of what the store nodes say about their blocks, for people and programs that watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.cluster.membership import Membership
from moonpool.cluster.store_watches import StoreWatches
from moonpool.core.config import TimingConfig
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId, Role
from moonpool.core.membership import Liveness, MemberChange

WAITING = 4096  # lines that may wait to be read; more are dropped and counted


@dataclass(frozen=True, slots=True)
class Line:
    """``what``: holds (a snapshot's summary), stored, removed, a liveness, missed (``count`` lines were dropped)."""

    node: str
    what: str
    tier: str = ""
    count: int = 0
    keys: tuple[bytes, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "what": self.what,
            "tier": self.tier,
            "count": self.count,
            "keys": [key.hex() for key in self.keys],
        }


class StoreEvents:
    """Event-loop only. ``lines`` may be asked for once; a reader too slow for the cluster misses lines, and is told."""

    def __init__(self, registry: str, timing: TimingConfig, nodes: Sequence[str] = ()) -> None:
        """``nodes``: only these; none: all, also those that come later."""
        self._registry, self._timing, self._nodes = registry, timing, frozenset(nodes)
        self._next: dict[tuple[NodeId, Incarnation], int] = {}
        self._queue: asyncio.Queue[Line] = asyncio.Queue(WAITING)
        self._missed = 0

    async def lines(self) -> AsyncIterator[Line]:
        """Ends when its reader closes it."""
        peers = Membership(self._registry, self._timing, lambda why, replaced: None)
        watches = StoreWatches(self._heard, self._wanted, 3 * self._timing.silent_after_ms / 1e3)

        def on_change(change: MemberChange) -> None:
            member = change.member
            if member.role is Role.STORE and (not self._nodes or member.node in self._nodes):
                if change.liveness is not Liveness.LIVE or (member.node, member.incarnation) not in self._next:
                    self._put(Line(member.node, change.liveness.value))
                watches.on_change(change)

        stop = peers.subscribe(on_change)
        try:
            while True:
                yield await self._queue.get()
                if self._missed:
                    missed, self._missed = self._missed, 0
                    yield Line("", "missed", count=missed)
        finally:
            stop()
            await watches.close()
            await peers.leave()

    def _put(self, line: Line) -> None:
        if self._queue.full():
            self._missed += 1
        else:
            self._queue.put_nowait(line)

    def _wanted(self, node: NodeId, incarnation: Incarnation) -> int:
        return self._next.get((node, incarnation), 0)

    def _heard(self, event: EventBatch | IndexSnapshot) -> bool:
        life = (NodeId(event.holder), event.incarnation)
        if isinstance(event, IndexSnapshot):
            self._next[life] = event.number + 1
            for tier, keys in event.entries:
                self._put(Line(event.holder, "holds", tier.value, len(keys)))
            return False
        expected = self._next.get(life, event.number)
        if event.number > expected:
            self._next[life] = 0  # events are missing: begin anew
            return True
        for one in event.events[expected - event.number :]:
            self._put(Line(event.holder, one.change.value, one.tier.value, len(one.keys), one.keys))
        self._next[life] = max(expected, event.number + len(event.events))
        return False
