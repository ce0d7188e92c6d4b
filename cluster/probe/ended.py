"""What is told of each request's life as it ends in this process: histograms of its steps, a line in the log, spans of a trace.

None of it may hold up or break serving: what fails is counted, and that is all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog
from prometheus_client import CollectorRegistry, Histogram

from moonpool.cluster.probe.catalogue.declared import STEP_SECONDS, part_of
from moonpool.cluster.probe.catalogue.metric import PREFIX
from moonpool.cluster.probe.catalogue.steps import steps_of, told
from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime, Lives

_log = structlog.get_logger()
_WORDS = {
    Role.CONDUCTOR: "placement over",
    Role.PREFILL: "prefill over",
    Role.DECODE: "attempt over",
    Role.BOTH: "attempt over",
    Role.STORE: "landing over",
}


class Traces(Protocol):
    """Where spans go."""

    def ended(self, role: Role, request: str, attempt: int, life: Lifetime) -> None: ...


class EndedLives:
    """Event-loop only; ``registry`` may be read by any thread. ``role`` is the process's own at the moment.

    ``traces``: where spans go, if anywhere.
    """

    def __init__(self, role: Callable[[], Role], *, log_each: bool = True) -> None:
        self._role, self._log_each = role, log_each
        self.traces: Traces | None = None
        self._of: dict[str, tuple[CollectorRegistry, Histogram]] = {}
        self._empty = CollectorRegistry()
        self.errors = 0

    @property
    def registry(self) -> CollectorRegistry:
        """Of the role that the process has now."""
        role = self._role()
        return self._histogram(role)[0] if steps_of(role) else self._empty

    def follow(self, lives: Lives) -> None:
        lives.on_ended = self.ended

    def ended(self, request: str, attempt: int, life: Lifetime) -> None:
        try:
            self._tell(request, attempt, life)
        except Exception as e:  # noqa: BLE001  nobody's request ends because of what is told of it
            self.errors += 1
            if self.errors in (1, 10, 100) or not self.errors % 1_000:
                _log.warning("life not told", times=self.errors, exc_info=e)

    def _tell(self, request: str, attempt: int, life: Lifetime) -> None:
        role = self._role()
        histogram = self._histogram(role)[1]
        for step, begin, end in told(role, life):
            histogram.labels(step.name).observe(end - begin)
        if self.traces is not None:
            self.traces.ended(role, request, attempt, life)
        if self._log_each and role in _WORDS:  # a gateway says more about a request than its instants
            _log.info(_WORDS[role], request=request, attempt=attempt, **_in_words(role, life))

    def _histogram(self, role: Role) -> tuple[CollectorRegistry, Histogram]:
        part = part_of(role)
        if part not in self._of:
            registry = CollectorRegistry()
            name = f"{PREFIX}_{part}_{STEP_SECONDS.name}"
            made = Histogram(name, STEP_SECONDS.text, STEP_SECONDS.labels, buckets=STEP_SECONDS.buckets, registry=registry)
            for step in steps_of(role):
                made.labels(step.name)
            self._of[part] = registry, made
        return self._of[part]


def _in_words(role: Role, life: Lifetime) -> dict[str, str | int | float]:
    """Its facts, and how long it was here."""
    first, last = min(life.at.values(), default=0.0), max(life.at.values(), default=0.0)
    sealed = {"sealed": Instant.SEALED in life.at} if role is Role.STORE else {}
    return {**life.facts, **sealed, "seconds": round(last - first, 6)}
