"""What another policy would have decided, over a recorded log: one decision at a time, everything else as it was.

A conductor is told everything that the recorded one was told. At the moment of each answer, before it books what was really
decided, the other policy is asked what it would choose instead. Both choices are priced by the same estimates at the same
moment, and both keep the time that the request had waited until then, so their difference is one of choices; what would
follow from another choice (other queues, other caches) is not played out here, a simulation does that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.membership import MemberChange, WorkerReport
from moonpool.core.placement import Finished, PlaceRequest
from moonpool.scheduler.actions import Resync
from moonpool.scheduler.choice import Considered
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policy import Policy
from moonpool.scheduler.recording import Answered, Entry

WORST = 20  # differences listed


@dataclass(slots=True)
class Compared:
    """One decision. TTFTs are predictions in seconds, from arrival; None where a side found or placed nobody."""

    request: str
    attempt: int
    at: float
    recorded: Considered | None = None
    other: Considered | None = None
    waited_s: float = 0.0
    refused: str = ""
    actual_ttft_s: float | None = None

    @property
    def differs(self) -> bool:
        """Nobody but the admission refuses: a refused request has nothing to differ from."""
        mine, other = self.recorded, self.other
        if mine is None or other is None:
            return False
        return (mine.prefill, mine.decode, mine.until) != (other.prefill, other.decode, other.until)

    @property
    def recorded_ttft_s(self) -> float | None:
        return None if self.recorded is None else self.waited_s + self.recorded.option.ttft.likely

    @property
    def other_ttft_s(self) -> float | None:
        return None if self.other is None else self.waited_s + self.other.option.ttft.likely

    @property
    def gain_s(self) -> float | None:
        """How much sooner the other policy's choice was predicted to answer."""
        mine, other = self.recorded_ttft_s, self.other_ttft_s
        return None if mine is None or other is None else mine - other

    def told(self) -> dict[str, Any]:
        mine, other = self.recorded, self.other
        return {
            "request": self.request,
            "attempt": self.attempt,
            "recorded": None if mine is None else _named(mine),
            "other": None if other is None else _named(other),
            "recorded_ttft_ms": _ms(self.recorded_ttft_s),
            "other_ttft_ms": _ms(self.other_ttft_s),
            "actual_ttft_ms": _ms(self.actual_ttft_s),
            "refused": self.refused,
        }


@dataclass(slots=True)
class Counterfactual:
    """``resets``: times that blocks of a holder had to be taken up in the middle; after one the index claims less than was."""

    policy: str
    compared: list[Compared] = field(default_factory=list)
    resets: int = 0

    def figures(self) -> dict[str, Any]:
        both = [one for one in self.compared if one.gain_s is not None]
        differing = [one for one in self.compared if one.differs]
        worst = sorted((one for one in both if one.differs), key=lambda one: -abs(one.gain_s or 0.0))
        return {
            "policy": self.policy,
            "decisions": len(self.compared),
            "refused": sum(1 for one in self.compared if one.refused),
            "compared": len(both),
            "differ": len(differing),
            "index_resets": self.resets,
            "recorded_ttft_ms": _spread([one.recorded_ttft_s for one in both]),
            "other_ttft_ms": _spread([one.other_ttft_s for one in both]),
            "predicted_gain_ms": _spread([one.gain_s for one in both]),
            "actual_ttft_ms": _spread([one.actual_ttft_s for one in both]),
            "largest_differences": [one.told() for one in worst[:WORST]],
        }


def counterfactual(entries: Iterable[Entry], policy: Policy, *, booking_s: float = 120.0) -> Counterfactual:
    """Replay ``entries``, a record in order of time, with ``policy`` looking on."""
    found = Counterfactual(policy.name)
    conductor = Conductor(booking_s=booking_s)
    open_requests: dict[tuple[str, int], tuple[PlaceRequest, Compared]] = {}
    for entry in entries:
        match entry.said:
            case PlaceRequest() as asked:
                one = Compared(asked.request, asked.attempt, entry.at)
                found.compared.append(one)
                open_requests[(asked.request, asked.attempt)] = asked, one
            case Answered() as answer:
                if (known := open_requests.get((answer.request, answer.attempt))) is not None:
                    _answered(conductor, policy, answer, *known, entry.at)
            case Finished() as done:
                over = open_requests.pop((done.request, done.attempt), None)
                if over is not None and done.ttft_ms > 0.0:
                    over[1].actual_ttft_s = done.ttft_ms / 1e3
                conductor.finished(done, entry.at)
            case MemberChange() | WorkerReport() | EventBatch() | IndexSnapshot() as event:
                found.resets += _observe(conductor, event, entry.at)
    return found


def _answered(conductor: Conductor, policy: Policy, answer: Answered, asked: PlaceRequest, one: Compared, at: float) -> None:
    one.waited_s = at - one.at
    one.other = conductor.consider(asked, policy, at)
    if answer.placement is not None:
        one.recorded = conductor.assume(asked, answer.placement, at)
    elif answer.refusal is not None:
        one.refused = answer.refusal.reason.value


def _observe(conductor: Conductor, event: MemberChange | WorkerReport | EventBatch | IndexSnapshot, at: float) -> int:
    """1 where a store node's events begin in the middle: nobody can be asked for its snapshot any more."""
    actions = conductor.observe(event, at)
    if not isinstance(event, EventBatch) or not any(isinstance(action, Resync) for action in actions):
        return 0
    conductor.observe(IndexSnapshot(event.holder, event.incarnation, event.number - 1, ()), at)
    conductor.observe(event, at)
    return 1


def _named(one: Considered) -> dict[str, Any]:
    return {"prefill": one.prefill, "decode": one.decode, "cached_blocks": one.until}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _spread(seconds: list[float | None]) -> dict[str, float]:
    values = np.array([one for one in seconds if one is not None])
    if not len(values):
        return {}
    return {
        "mean": round(float(values.mean()) * 1e3, 3),
        "p50": round(float(np.quantile(values, 0.5)) * 1e3, 3),
        "p90": round(float(np.quantile(values, 0.9)) * 1e3, 3),
    }
