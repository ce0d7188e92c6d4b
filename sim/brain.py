"""The production conductor on the virtual clock: events in, its actions performed."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.membership import MemberChange, WorkerReport
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.scheduler.actions import Action
from moonpool.scheduler.conductor import Conductor
from moonpool.sim.clock import Clock, Timer

AGAIN_S = 0.01  # a conductor that wants to be called now, and was just called, is called again after this


class Brain:
    """``perform`` carries out an action."""

    def __init__(self, conductor: Conductor, clock: Clock, perform: Callable[[Action], None]) -> None:
        self.conductor = conductor
        self._clock = clock
        self._perform = perform
        self._timer: Timer | None = None
        self._over = False

    def tell(self, event: MemberChange | EventBatch | IndexSnapshot | WorkerReport) -> None:
        self._do(self.conductor.observe(event, self._clock.now))
        if not isinstance(event, EventBatch):
            self._plan()

    def place(self, request: PlaceRequest) -> Placement | Refusal | Later:
        answer = self.conductor.place(request, self._clock.now)
        self._do(self.conductor.take_actions())
        self._plan()
        return answer

    def finished(self, done: Finished) -> None:
        self._do(self.conductor.finished(done, self._clock.now))
        self._plan()

    def withdraw(self, request: str) -> None:
        self.conductor.withdraw(request, self._clock.now)

    def prefilled(self, request: str) -> Refusal | None:
        return self.conductor.prefilled(request, self._clock.now)

    def stop(self) -> None:
        """No request is left: the conductor is asked no more what it wants to do."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            self._perform(action)

    def _plan(self) -> None:
        at = None if self._over else self.conductor.next_at()
        if at is None:
            return
        at = max(at, self._clock.now + (AGAIN_S if at <= self._clock.now else 0.0))
        if self._timer is None or self._timer.when > at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._clock.at(at, self._due)

    def _due(self) -> None:
        self._timer = None
        self._do(self.conductor.due(self._clock.now))
        self._plan()
