"""The named instants of a request's life. Every latency is the difference of two of them.

Clocks: all instants of one ``Lifetime`` come from one process's monotonic clock, in seconds; nothing subtracts
instants of two machines.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

MOST_TRIES = 32  # of one request that are remembered: those given back or refused for a while are not bounded in number


class Instant(StrEnum):
    ARRIVED = "arrived"  # first byte of the request at the gateway
    READ = "read"  # the gateway has the whole body
    PARSED = "parsed"  # and has checked it
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
class Try:
    """One attempt as its gateway saw it; ``facts`` as in ``Lifetime``."""

    number: int
    begun: float
    ended: float = 0.0
    facts: dict[str, str | int | float] = field(default_factory=dict)


@dataclass(slots=True)
class Lifetime:
    """``facts`` go to logs and traces: names of processes, counts, reasons; nothing of a prompt or an answer.

    ``tries``: at gateways, the newest attempts.
    """

    at: dict[Instant, float] = field(default_factory=dict)
    facts: dict[str, str | int | float] = field(default_factory=dict)
    tries: list[Try] = field(default_factory=list)

    def begin_try(self, number: int, now: float) -> Try:
        del self.tries[: len(self.tries) + 1 - MOST_TRIES]
        self.tries.append(Try(number, now))
        return self.tries[-1]

    def stamp(self, instant: Instant, now: float) -> None:
        """The first stamp of an instant stays."""
        self.at.setdefault(instant, now)

    def between(self, earlier: Instant, later: Instant) -> float | None:
        """Seconds from ``earlier`` to ``later``; None where either did not happen."""
        if earlier in self.at and later in self.at:
            return self.at[later] - self.at[earlier]
        return None


def _nobody(request: str, attempt: int, life: Lifetime) -> None:
    pass


class Lives:
    """The newest lifetimes of one process, oldest first, each with its number: the first one ever is 0.

    ``on_ended`` (request, attempt, life) hears of each as it ends, and must not raise.
    """

    def __init__(self, kept: int = 4_096) -> None:
        self._kept: deque[tuple[str, int, Lifetime]] = deque(maxlen=kept)
        self._added = 0
        self.on_ended: Callable[[str, int, Lifetime], None] = _nobody

    def add(self, request: str, attempt: int, life: Lifetime) -> None:
        self._kept.append((request, attempt, life))
        self._added += 1
        self.on_ended(request, attempt, life)

    def __len__(self) -> int:
        return len(self._kept)

    def newest(self) -> Lifetime | None:
        return self._kept[-1][2] if self._kept else None

    def of(self, request: str) -> list[tuple[int, Lifetime]]:
        """(attempt, its lifetime) of those that are kept, oldest first."""
        return [(attempt, life) for name, attempt, life in self._kept if name == request]

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
        return oldest + skipped + len(lives), lives_json(lives)


def lives_json(lives: Iterable[tuple[str, int, Lifetime]]) -> str:
    return json.dumps([[request, attempt, {i.value: t for i, t in life.at.items()}] for request, attempt, life in lives])
