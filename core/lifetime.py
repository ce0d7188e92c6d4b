"""The named instants of a request's life. Every latency is the difference of two of them.

Clocks: all instants of one ``Lifetime`` come from one process's monotonic clock, in seconds; nothing subtracts
instants of two machines.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum


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
    LAST_LAYER_LANDED = "last_layer_landed"
    RUNNABLE = "runnable"  # every block in device pages: may join the running batch
    FINISHED = "finished"
    REFUSED = "refused"


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
    """The newest lifetimes of one process, oldest first."""

    def __init__(self, kept: int = 256) -> None:
        self._kept: deque[tuple[str, int, Lifetime]] = deque(maxlen=kept)

    def add(self, request: str, attempt: int, life: Lifetime) -> None:
        self._kept.append((request, attempt, life))

    def __len__(self) -> int:
        return len(self._kept)

    def newest(self) -> Lifetime | None:
        return self._kept[-1][2] if self._kept else None

    def to_json(self, last: int) -> str:
        """``[[request, attempt, {instant: seconds}], ...]`` of the ``last`` newest. One machine, one clock."""
        lives = list(self._kept)[-last:]
        return json.dumps([[request, attempt, {i.value: t for i, t in life.at.items()}] for request, attempt, life in lives])
