"""What a worker tells conductors about its device pages: numbered event batches, and a snapshot when somebody new listens."""

from __future__ import annotations

from moonpool.core.events import BlockChange, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, MemberId
from moonpool.engine.pages import PagePool
from moonpool.wire.frames import encode_events, encode_snapshot

SNAPSHOT_EVERY = 40  # frames; a report that was lost is mended by the next snapshot, at four reports a second within 10 s


class PageJournal:
    """Follows one ``PagePool``. One thread, the pool's own."""

    def __init__(self, pages: PagePool, holder: MemberId, incarnation: Incarnation) -> None:
        self._pages = pages
        self._holder = holder
        self._incarnation = incarnation
        self._number = 0  # events told so far
        self._keys: dict[bytes, None] = {}
        self._until_snapshot = 0

    def resync(self) -> None:
        """The next frames begin with a snapshot: a conductor has come, or lost its count."""
        self._until_snapshot = 0

    def frames(self) -> tuple[bytes, ...]:
        """Frames for the next report: what changed since the last call, or everything."""
        events = self._pages.drain_changes()
        for event in events:
            for key in event.keys:
                if event.change is BlockChange.STORED:
                    self._keys[key] = None
                else:
                    self._keys.pop(key, None)
        first = self._number + 1
        self._number += len(events)
        self._until_snapshot -= 1
        if self._until_snapshot < 0:
            self._until_snapshot = SNAPSHOT_EVERY
            entries = ((Tier.G1, tuple(self._keys)),)
            return (encode_snapshot(IndexSnapshot(self._holder, self._incarnation, self._number, entries)),)
        if not events:
            return ()
        return (encode_events(EventBatch(self._holder, self._incarnation, first, tuple(events))),)
