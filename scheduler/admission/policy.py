"""What decides whether a placed request is let in."""

from __future__ import annotations

from typing import Protocol

from moonpool.core.placement import Finished, Refusal
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policy import Asked


class Admission(Protocol):
    name: str

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        """On arrival; ``option`` is the best placement there is. None lets it in."""

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        """When its prefill has ended, before it joins a batch; ``option.tbt`` is for now."""

    def finished(self, done: Finished, now: float) -> None:
        """An attempt is over, however it ended."""
