"""What decides whether a placed request is let in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Judging(Protocol):
    """An admission that tells the numbers of its newest verdict, for the decision's record."""

    judged: Mapping[str, float]
