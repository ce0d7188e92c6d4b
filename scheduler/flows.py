"""Transfers in flight, as bytes that share links: what is left of each one at any time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LIMIT = 4_096  # flows; beyond it the oldest is forgotten
OVERDUE_S = 30.0  # a flow that nobody ended this long after its predicted end is forgotten
EMPTY_BYTES = 1e-3


@dataclass(slots=True)
class Flow:
    """``left`` bytes from node ``source`` to node ``target`` (numbers), moving from ``at`` on."""

    source: int
    target: int
    left: float
    at: float
    moved_s: float = 0.0
    shared_s: float = 0.0  # integral of how many flows its narrowest link carried
    done_at: float = 0.0


@dataclass(slots=True)
class Costs:
    """Seconds per byte of each node's ways out and in and of [source, target] pairs, alone; 0: unknown, taken as free."""

    out: Floats
    into: Floats
    pair: Floats


class Flows:
    """A link gives each of its flows an equal share; a flow goes at the smallest of its shares."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}  # oldest first
        self._now = float("-inf")

    def __len__(self) -> int:
        return len(self._flows)

    def begin(self, name: str, flow: Flow) -> None:
        self._flows.pop(name, None)
        self._flows[name] = flow
        if len(self._flows) > LIMIT:
            del self._flows[next(iter(self._flows))]

    def end(self, name: str) -> None:
        self._flows.pop(name, None)

    def forget(self, node: int) -> None:
        for name in [name for name, flow in self._flows.items() if node in (flow.source, flow.target)]:
            del self._flows[name]

    def take(self, source: int, target: int) -> Flow | None:
        """End the oldest flow of this pair that began; it is what a measurement of the pair speaks of."""
        for name, flow in self._flows.items():
            if flow.source == source and flow.target == target and flow.at <= self._now:
                del self._flows[name]
                return flow
        return None

    def active(self) -> list[Flow]:
        return [flow for flow in self._flows.values() if flow.left > EMPTY_BYTES and flow.at <= self._now]

    def advance(self, now: float, costs: Costs) -> None:
        """Move bytes until ``now``. Time never goes back."""
        if not self._flows or now <= self._now:
            self._now = max(self._now, now)
            return
        time = min(max(self._now, min(flow.at for flow in self._flows.values())), now)
        while time < now:
            moving = [flow for flow in self._flows.values() if flow.left > EMPTY_BYTES and flow.at <= time]
            begins = min((flow.at for flow in self._flows.values() if flow.at > time), default=now)
            time = self._step(moving, time, min(begins, now), costs)
        self._now = now
        for name in [n for n, flow in self._flows.items() if flow.left <= EMPTY_BYTES and flow.done_at + OVERDUE_S < now]:
            del self._flows[name]

    def _step(self, moving: list[Flow], time: float, until: float, costs: Costs) -> float:
        """Up to the first end of a flow, or ``until``; returns when that is."""
        out, into = Counter(flow.source for flow in moving), Counter(flow.target for flow in moving)
        pair = Counter((flow.source, flow.target) for flow in moving)
        paces: list[tuple[float, int]] = []
        for flow in moving:
            ends = flow.source, flow.target
            paces.append(
                max(
                    (costs.out[flow.source] * out[flow.source], out[flow.source]),
                    (costs.into[flow.target] * into[flow.target], into[flow.target]),
                    (costs.pair[ends] * pair[ends], pair[ends]),
                )
            )
        took = min((flow.left * pace for flow, (pace, _) in zip(moving, paces, strict=True)), default=until - time)
        took = min(took, until - time)
        for flow, (pace, sharing) in zip(moving, paces, strict=True):
            flow.moved_s += took
            flow.shared_s += took * sharing
            flow.left = 0.0 if flow.left * pace <= took else flow.left - took / pace
            flow.done_at = time + took
        return until if took >= until - time else time + took
