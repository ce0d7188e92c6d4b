"""Whether to try again what keeps failing: a circuit breaker. Pure: facts, ``now`` and random draws in, answers out.

    closed ──so many failures in a row──> open ──its time is over──> half open ──success──> closed
                                           ^                             └──failure──> open, for longer

Half open, one try at a time goes through: the probe. What was begun before the breaker opened and ends later says nothing
about now. (M. Nygard, "Release It!", 2007: circuit breaker; the wait is exponential with jitter.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class Pace:
    """``failures`` in a row open it, for ``first_s`` at first and twice as long each time, ``longest_s`` at most.

    A probe that has not ended after ``probe_s`` no longer keeps others from trying.
    """

    failures: int = 3
    first_s: float = 1.0
    longest_s: float = 30.0
    probe_s: float = 10.0


def wait_s(pace: Pace, times: int, draw: float) -> float:
    """The wait after the ``times``-th failure in a row (from 1): doubling, bounded, with jitter over its upper half.

    ``draw`` is random in [0, 1).
    """
    full = min(pace.first_s * (1 << min(times - 1, 32)), pace.longest_s)
    return full * (1 + draw) / 2


class Breaker:
    """``now`` is in seconds of one monotonic clock and never goes back."""

    def __init__(self, pace: Pace = Pace()) -> None:
        self._pace = pace
        self._failed = 0  # in a row, while closed
        self._opened = 0  # times in a row without a success between them
        self._open_until: float | None = None  # None: closed
        self._probe_until: float | None = None

    def state(self, now: float) -> State:
        if self._open_until is None:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a try may begin now. Whoever begins one while half open says so by ``begin``."""
        match self.state(now):
            case State.CLOSED:
                return True
            case State.OPEN:
                return False
            case State.HALF_OPEN:
                return self._probe_until is None or now >= self._probe_until

    def begin(self, now: float) -> None:
        """A try begins. Half open it is the probe, if there is none."""
        if self.state(now) is State.HALF_OPEN and self.allows(now):
            self._probe_until = now + self._pace.probe_s

    def given_up(self, now: float) -> None:
        """A try ended without a word about the other side: another may be the probe."""
        if self.state(now) is State.HALF_OPEN:
            self._probe_until = None

    def succeeded(self, now: float) -> None:
        if self.state(now) is not State.OPEN:
            self._failed = self._opened = 0
            self._open_until = self._probe_until = None

    def failed(self, now: float, draw: float) -> None:
        """``draw``: random in [0, 1)."""
        match self.state(now):
            case State.CLOSED:
                self._failed += 1
                if self._failed >= self._pace.failures:
                    self._open(now, draw)
            case State.HALF_OPEN:
                self._open(now, draw)
            case State.OPEN:
                pass

    def _open(self, now: float, draw: float) -> None:
        self._opened += 1
        self._open_until = now + wait_s(self._pace, self._opened, draw)
        self._probe_until, self._failed = None, 0
