"""Whether a loop that has work gets on with it. Pure: being busy is no fault, standing still with work pending is.

One ``ProgressWatch`` for each thing that can stand still by itself: an event loop, a compute thread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``still_s``: how long nothing was done although there was work; 0 without work. Seconds of one monotonic clock."""

    name: str
    still_s: float
    limit_s: float

    @property
    def good(self) -> bool:
        return self.still_s <= self.limit_s


class ProgressWatch:
    """``began`` and ``ended`` bracket one piece of work; pieces may overlap. Each end is progress for all that are open.

    A piece that legitimately takes long (a whole prompt in one step) must be cut or say how it goes on, or ``limit_s`` be
    above it.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self._limit_s = limit_s
        self._open = 0
        self._last = 0.0

    def began(self, now: float) -> None:
        if not self._open:
            self._last = now
        self._open += 1

    def went_on(self, now: float) -> None:
        """A part of an open piece is done."""
        self._last = now

    def ended(self, now: float) -> None:
        self._open = max(0, self._open - 1)
        self._last = now

    def at(self, now: float) -> Progress:
        return Progress(self.name, max(0.0, now - self._last) if self._open else 0.0, self._limit_s)


def stuck(parts: list[Progress]) -> list[Progress]:
    """The parts that stand still, worst first: none of them means alive."""
    return sorted((p for p in parts if not p.good), key=lambda p: p.still_s, reverse=True)
