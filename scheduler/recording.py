"""What a conductor heard, was asked and answered, with times: enough to ask later what another policy would have done.

Bounded in entries and in block keys, since one snapshot may hold a million of them. Who is a member is kept even when the
entries that said so are forgotten; which blocks lay where is not, and a record cut like that says so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import MemberId
from moonpool.core.membership import MemberChange, WorkerReport
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal

KEYS = 500_000  # names of blocks kept, about 30 MB


@dataclass(frozen=True, slots=True)
class Answered:
    """One of the two. ``at`` of its entry is when it was given: later than the request where that had to wait."""

    request: str
    attempt: int
    placement: Placement | None = None
    refusal: Refusal | None = None


Said = MemberChange | WorkerReport | EventBatch | IndexSnapshot | PlaceRequest | Answered | Finished


@dataclass(frozen=True, slots=True)
class Entry:
    at: float  # the conductor's monotonic clock, seconds
    said: Said


def answered(request: str, attempt: int, answer: Placement | Refusal) -> Answered:
    if isinstance(answer, Placement):
        return Answered(request, attempt, placement=answer)
    return Answered(request, attempt, refusal=answer)


class Recording:
    def __init__(self, limit: int, keys: int = KEYS) -> None:
        self._limit = limit
        self._key_limit = keys
        self._entries: deque[Entry] = deque()
        self._keys = 0
        self._members: dict[MemberId, Entry] = {}  # the newest word of forgotten entries about each
        self.cut = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, at: float, said: Said) -> None:
        if isinstance(said, WorkerReport) and said.g1_frames:
            said = replace(said, g1_frames=())  # their events are entries of their own
        self._entries.append(Entry(at, said))
        self._keys += keys_in(said)
        while len(self._entries) > self._limit or (self._keys > self._key_limit and len(self._entries) > 1):
            self._forget()

    def entries(self, last: int = 0) -> list[Entry]:
        """Members first, where the record no longer begins with the conductor's life. ``last``: so many of the newest."""
        kept = list(self._entries)
        if not last or last >= len(kept):
            return [*self._members.values(), *kept]
        known = dict(self._members)
        for entry in kept[:-last]:
            if isinstance(entry.said, MemberChange):
                known[entry.said.member.id] = entry
        return [*known.values(), *kept[-last:]]

    def _forget(self) -> None:
        self.cut = True
        oldest = self._entries.popleft()
        self._keys -= keys_in(oldest.said)
        if isinstance(oldest.said, MemberChange):
            self._members[oldest.said.member.id] = oldest


def keys_in(said: Said) -> int:
    match said:
        case PlaceRequest():
            return len(said.keys)
        case EventBatch():
            return sum(len(event.keys) for event in said.events)
        case IndexSnapshot():
            return sum(len(keys) for _, keys in said.entries)
    return 0
