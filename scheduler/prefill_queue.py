"""When a prefill worker will begin what: the schedule of what it computes and of what waits there.

One job computes at a time, to its end; which one is next is the rule of ``prefill_worker.chunk_planner``: the earliest
arrival, or the smallest predicted work with ageing and a cap on the wait. A prompt is charged only for what will go before
it, so under shortest-first a short one does not see the long ones that wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from moonpool.core.ids import MemberId

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NEVER = 1e18  # arrival of a job that is not there


@dataclass(frozen=True, slots=True)
class Rule:
    """``shortest``: smallest ``work - age_weight x age`` first, and before it, oldest first, who waited for ``wait_cap_s``;
    otherwise in order of arrival."""

    shortest: bool = False
    age_weight: float = 0.1
    wait_cap_s: float = inf

    def rank(self, job: Waiting, now: float) -> tuple[bool, float, float]:
        if not self.shortest:
            return False, job.arrived, 0.0
        if now - job.arrived >= self.wait_cap_s:
            return False, job.arrived, 0.0
        return True, job.work_s + self.age_weight * job.arrived, job.arrived


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job of ``work_s`` predicted seconds that came at ``arrived``."""

    name: str
    work_s: float
    arrived: float


@dataclass(frozen=True, slots=True)
class Turn:
    name: str
    begins: float
    ends: float


def schedule(waiting: Sequence[Waiting], free_at: float, rule: Rule) -> list[Turn]:
    """Turns in order, nobody else arriving. ``free_at``: when what computes now will be done. Of equals, the first listed."""
    left, time, turns = list(waiting), free_at, []
    while left:
        job = min(left, key=lambda one: rule.rank(one, time))
        left.remove(job)
        turns.append(Turn(job.name, time, time + job.work_s))
        time += job.work_s
    return turns


class PrefillQueues:
    """The queues of all prefill workers as arrays: one question answers for every row of a board."""

    def __init__(self, rule: Rule | None = None) -> None:
        self.rule = rule or Rule()
        self._queues: dict[MemberId, tuple[Sequence[Waiting], float]] = {}
        self._arrange((), 0)

    def write(self, worker: MemberId, waiting: Sequence[Waiting], free_at: float) -> None:
        """What waits at ``worker`` and when what it computes now will be done."""
        self._queues[worker] = waiting, free_at
        row = self._rows.get(worker)
        if row is not None:
            if len(waiting) > self._works.shape[1]:
                self._arrange(self._workers, 2 * len(waiting))
            else:
                self._fill(row, waiting, free_at)

    def forget(self, worker: MemberId) -> None:
        if self._queues.pop(worker, None) is not None:
            self._arrange((), 0)

    def waits(self, workers: tuple[MemberId, ...], work_s: float | Floats, now: float) -> Floats:
        """Per worker: seconds until a job of ``work_s`` (one number, or one per worker) that comes now would be begun.

        Exact if nobody else comes: everybody here came before it, so at any moment at which it is its turn by the cap,
        those waiting here for longer than the cap are older and go first.
        """
        if workers is not self._workers:
            longest = max((len(self._queues[name][0]) for name in workers if name in self._queues), default=0)
            self._arrange(workers, longest)
        free = np.maximum(self._free_at - now, 0.0)
        if not self.rule.shortest:
            return np.asarray(free + self._works.sum(axis=1))
        mine = np.broadcast_to(np.asarray(work_s, np.float64), free.shape) + self.rule.age_weight * now
        before = self._keys <= mine[:, None]
        waits: Floats = free + (self._works * before).sum(axis=1)
        while self.rule.wait_cap_s < inf:
            late = ~before & (self._arrived + self.rule.wait_cap_s <= (now + waits)[:, None])
            if not late.any():
                break
            before |= late
            waits = free + (self._works * before).sum(axis=1)
        return waits

    def _arrange(self, workers: tuple[MemberId, ...], longest: int) -> None:
        self._workers, self._rows = workers, {name: row for row, name in enumerate(workers)}
        self._works = np.zeros((len(workers), longest))
        self._keys, self._arrived = np.full_like(self._works, inf), np.full_like(self._works, NEVER)
        self._free_at = np.zeros(len(workers))
        for name, row in self._rows.items():
            if name in self._queues:
                self._fill(row, *self._queues[name])

    def _fill(self, row: int, waiting: Sequence[Waiting], free_at: float) -> None:
        self._free_at[row] = free_at
        self._works[row], self._keys[row], self._arrived[row] = 0.0, inf, NEVER
        if waiting:
            table = np.array([(job.work_s, job.arrived) for job in waiting])
            self._works[row, : len(table)], self._arrived[row, : len(table)] = table.T
            self._keys[row, : len(table)] = table[:, 0] + self.rule.age_weight * table[:, 1]
