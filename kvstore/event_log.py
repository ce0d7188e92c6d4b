"""Numbered block events of one life of a store node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.core.errors import Bug
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, NodeId

EVENT_KEYS = 1024  # keys in one event, so that a batch stays far below the frame limit
BATCH_EVENTS = 16


class EventLog:
    """Neighbouring changes of one kind in one tier share an event until it is taken."""

    def __init__(self, holder: NodeId, incarnation: Incarnation) -> None:
        self._holder = holder
        self._incarnation = incarnation
        self._open: list[tuple[BlockChange, Tier, list[bytes]]] = []
        self._first = 1  # number of the first event not taken yet

    @property
    def head(self) -> int:
        """Number of the newest event; 0 before the first one."""
        return self._first + len(self._open) - 1

    def record(self, change: BlockChange, tier: Tier, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        if self._open:
            last, where, known = self._open[-1]
            if last is change and where is tier and len(known) + len(keys) <= EVENT_KEYS:
                known.extend(keys)
                return
        for start in range(0, len(keys), EVENT_KEYS):
            self._open.append((change, tier, list(keys[start : start + EVENT_KEYS])))

    def take(self) -> list[EventBatch]:
        """Everything since the last call, in batches of bounded size."""
        out = []
        for i in range(0, len(self._open), BATCH_EVENTS):
            part = self._open[i : i + BATCH_EVENTS]
            events = tuple(BlockEvent(change, tier, tuple(keys)) for change, tier, keys in part)
            out.append(EventBatch(self._holder, self._incarnation, self._first + i, events))
        self._first += len(self._open)
        self._open.clear()
        return out

    def snapshot(self, tiers: Iterable[tuple[Tier, Sequence[bytes]]]) -> IndexSnapshot:
        """The keys of each tier as the state after the newest event. Call with nothing left to take."""
        if self._open:
            raise Bug("a snapshot was asked for while events wait to be taken")
        return IndexSnapshot(self._holder, self._incarnation, self.head, tuple((tier, tuple(keys)) for tier, keys in tiers))


def sealed_in_dram(batches: Iterable[EventBatch]) -> list[bytes]:
    """The blocks that tiers below DRAM may have to be given."""
    events = [event for batch in batches for event in batch.events]
    return [key for e in events if e.tier is Tier.G2 and e.change is BlockChange.STORED for key in e.keys]
