"""The named instants of a request's life. Every latency is the difference of two of them.

Clocks: all instants of one ``Lifetime`` come from one process's monotonic clock, in seconds; nothing subtracts
instants of two machines.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice


class Instant(StrEnum):
    ARRIVED = "arrived"  # first byte of the request at the gateway
    TOKENISED = "tokenised"
    PLACED = "placed"
    ADMITTED = "admitted"  # the decode worker took the attempt
    QUEUED = "queued"  # at the prefill worker
    LANDING_GRANTED = "landing_granted"
    PREFILL_BEGUN = "prefill_begun"
    PREFIX_LOADED = "prefix_loaded"
    LAST_LAYER_COMPUTED = "last_layer_computed"
    FIRST_TOKEN = "first_token"
    LAST_LAYER_LANDED = "last_layer_landed"  # at the decode worker: it has heard of every slice of the landing
    SEALED = "sealed"  # at the store node: every slice of the landing is verified in its slot
    RUNNABLE = "runnable"  # every block in device pages: may join the running batch
    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"  # nobody wants it any more, or its time was over: it was still held here


@dataclass(slots=True)
class Lifetime:
    at: dict[Instant, float] = field(default_factory=dict)

    def stamp(self, instant: Instant, now: float) -> None:
        """The first stamp of an instant stays."""
        self.at.setdefault(instant, now)

    def between(self, earlier: Instant, later: Instant) -> float | None:
        """Seconds from ``earlier`` to ``later``; None where either did not happen."""
        if earlier in self.at and later in self.at:
            return self.at[later] - self.at[earlier]
        return None


class Lives:
    """The newest lifetimes of one process, oldest first, each with its number: the first one ever is 0."""

    def __init__(self, kept: int = 4_096) -> None:
        self._kept: deque[tuple[str, int, Lifetime]] = deque(maxlen=kept)
        self._added = 0

    def add(self, request: str, attempt: int, life: Lifetime) -> None:
        self._kept.append((request, attempt, life))
        self._added += 1

    def __len__(self) -> int:
        return len(self._kept)

    def newest(self) -> Lifetime | None:
        return self._kept[-1][2] if self._kept else None

    def to_json(self, last: int) -> str:
        """``[[request, attempt, {instant: seconds}], ...]`` of the ``last`` newest. One machine, one clock."""
        return self.since(self._added - last, last)[1]

    def since(self, number: int, most: int) -> tuple[int, str]:
        """At most ``most`` lifetimes from ``number`` on, as in ``to_json``, and the number after the last one.

        Those no longer kept are left out.
        """
        oldest = self._added - len(self._kept)
        skipped = max(number - oldest, 0)
        lives = list(islice(self._kept, skipped, skipped + most))
        told = [[request, attempt, {i.value: t for i, t in life.at.items()}] for request, attempt, life in lives]
        return oldest + skipped + len(lives), json.dumps(told)
