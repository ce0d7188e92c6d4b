"""Lets everything in."""

from __future__ import annotations

from moonpool.core.placement import Finished, Refusal
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked


class Everything:
    name = "none"

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        return None

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        return None

    def finished(self, done: Finished, now: float) -> None:
        pass
