"""The virtual clock: a heap of calls and their times. Calls due at one time are made in the order they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from moonpool.core.errors import Bug

Call = Callable[[], None]


class Timer:
    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Call) -> None:
        self.when = when
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class Clock:
    """Seconds from the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0

    def at(self, when: float, call: Call) -> Timer:
        """Call ``call`` at ``when``, which is not in the past."""
        if when < self.now:
            raise Bug(f"the simulator planned something for {when:.9f} s at {self.now:.9f} s")
        timer = Timer(when, call)
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, timer))
        return timer

    def after(self, seconds: float, call: Call) -> Timer:
        return self.at(self.now + seconds, call)

    def run(self) -> None:
        """Until nothing more is planned."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            when, _, timer = pop(heap)
            if timer.call is not None:
                self.now = when
                timer.call()
