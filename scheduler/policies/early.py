"""What all policies have in common that place a request when it arrives: it then waits in its worker's own queue."""

from __future__ import annotations

from moonpool.scheduler.actions import Action
from moonpool.scheduler.policy import Asked, Choice, Waiting


class Early:
    late = False
    lookahead_s = 0.0
    lookahead_both_s = 0.0
    wait_cap_s = float("inf")

    def key(self, waiting: Waiting) -> float:
        return waiting.arrived

    def ahead(self, asked: Asked, choice: Choice) -> list[Action]:
        return []

    def follow_up(self, asked: Asked, choice: Choice) -> list[Action]:
        return []
