"""What is known of every live, ready worker, as one row of arrays: what a placement policy reads.

Rows are ordered by member id. A row is written when its worker reports or is booked; the arrays are made anew when
membership changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import LiveAttempt, Member, WorkerReport
from moonpool.core.placement import WorkerRef
from moonpool.scheduler.bookings import Coming
from moonpool.scheduler.decode_courses import DecodeCourses
from moonpool.scheduler.decode_forecast import Ahead, DecodeForecast
from moonpool.scheduler.estimates import Fit, PrefillEstimate, Speed, StepEstimate
from moonpool.scheduler.prefill_queue import PrefillQueues, Waiting

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Kind = tuple[Role, KVLayout, str, str, str]  # with engine, device and dtype

UNLIMITED = 1 << 62
NO_BIT = -1  # the row holds nothing in that index; as a subscript it finds the last entry, which is 0


@dataclass(slots=True)
class Worker:
    """One life of one worker and its newest report."""

    member: Member
    attempts: tuple[LiveAttempt, ...] = ()
    free_tokens: int = UNLIMITED  # that new sequences could take; unlimited until the first report
    busy_until: float = 0.0  # when the prefill work it reported and what was booked since will be done, as estimated
    last_chosen: int = 0  # placement number
    prefill: PrefillEstimate = field(default_factory=PrefillEstimate)
    step: StepEstimate = field(default_factory=StepEstimate)
    speed: Speed = field(default_factory=Speed)  # compared with all of its kind
    waiting: list[Waiting] = field(default_factory=list)  # prefills it reported and has not begun
    free_at: float = 0.0  # when the one it computes will be done

    @property
    def kind(self) -> Kind | None:
        """Workers of one kind take equally long for a prompt, as far as they say what they are; None: it does not say."""
        m, told = self.member, self.member.details
        if m.layout is None or not told.get("engine"):
            return None
        return m.role, m.layout, told["engine"], told.get("device", ""), told.get("dtype", "")

    @property
    def ref(self) -> WorkerRef:
        m = self.member
        return WorkerRef(m.id, m.incarnation, m.node, m.address)

    def prompt_left(self, attempt: LiveAttempt) -> int:
        """Prompt tokens this worker still has to compute for ``attempt``."""
        return attempt.remaining_tokens if self.member.role is Role.PREFILL else attempt.prompt_left

    def take(self, report: WorkerReport, block_tokens: int) -> None:
        self.attempts = report.attempts
        if report.total_pages:
            self.free_tokens = report.free_pages * block_tokens


def seconds_of(fit: Fit, prompt: int, left: int) -> float:
    """Seconds to compute the last ``left`` of ``prompt`` tokens."""
    a, b, c, _ = fit.coefficients
    cached = max(prompt - left, 0)
    return a + b * left + c * (prompt * prompt - cached * cached)


@dataclass(frozen=True, slots=True)
class Usable:
    """Rows that may take a request. Workers of role both pair only with themselves."""

    split: Bools  # prefill workers to be paired with a decode worker; none where there is no decode worker
    decodes: Bools  # their decode workers: beside a live store node, since KV lands there
    both: Bools
    prefills: Bools  # split and both
    pooled: Bools  # the node's store is live and did not fail this request
    barred: frozenset[NodeId] = frozenset()  # nodes whose store failed this request

    @classmethod
    def of(cls, split: Bools, decodes: Bools, both: Bools, pooled: Bools, barred: frozenset[NodeId]) -> Usable | None:
        """None where no pair is left."""
        if not decodes.any():
            split = np.zeros_like(split)
        prefills = split | both
        return cls(split, decodes, both, prefills, pooled, barred) if prefills.any() else None


class Board:
    """Arrays of ``rows`` workers. Read-only for policies."""

    def __init__(
        self,
        workers: list[Worker],
        stores: dict[NodeId, Member],
        queues: PrefillQueues | None = None,
        courses: DecodeCourses | None = None,
    ) -> None:
        """``queues``: of prefill workers that do not compute in order of arrival. ``courses``: what is expected of decode
        workers; without, they are taken to be idle."""
        self._queues, self._courses = queues, courses
        self.workers = sorted(workers, key=lambda w: w.member.id)
        self.row: dict[MemberId, int] = {w.member.id: i for i, w in enumerate(self.workers)}
        self.names = tuple(w.member.id for w in self.workers)
        self.nodes = tuple(w.member.node for w in self.workers)
        self.turns = tuple(w.member.details.get("turns", "") for w in self.workers)  # equal ones share cores; empty: none do
        n = len(self.workers)
        self.numbers: Ints = np.arange(n)
        roles = [w.member.role for w in self.workers]
        self.split: Bools = np.array([role is Role.PREFILL for role in roles], bool)
        self.decode_only: Bools = np.array([role is Role.DECODE for role in roles], bool)
        self.both: Bools = np.array([role is Role.BOTH for role in roles], bool)
        self.pooled: Bools = np.array([w.member.node in stores for w in self.workers], bool)  # its node's store is live
        self.max_prompt: Ints = np.array([w.member.max_prompt or UNLIMITED for w in self.workers], np.int64)
        self.smallest = int(self.max_prompt.min(initial=UNLIMITED))
        self.block_bytes = max((w.member.layout.block_bytes for w in self.workers if w.member.layout), default=0)
        self.layers = max((w.member.layout.layers for w in self.workers if w.member.layout), default=0)
        self.everybody = Usable.of(self.split, self.decode_only & self.pooled, self.both, self.pooled, frozenset())
        self.busy_until: Floats = np.zeros(n)
        self.load: Ints = np.zeros(n, np.int64)  # attempts reported or booked
        self.batch: Ints = np.zeros(n, np.int64)  # sequences a decode worker holds or will
        self.context: Ints = np.zeros(n, np.int64)  # their tokens
        self.room: Ints = np.zeros(n, np.int64)  # tokens of free pages
        self.to_compute: Ints = np.zeros(n, np.int64)  # prompt tokens reported or booked and not computed yet
        self.last_chosen: Ints = np.zeros(n, np.int64)
        self.prefill_fit: Floats = np.zeros((4, n))
        self.prefill_spread: Floats = np.zeros(n)
        self.prefill_reach: Floats = np.zeros(n)  # 0 while unsure
        self.step_fit: Floats = np.zeros((3, n))
        self.step_spread: Floats = np.zeros(n)
        self.step_reach: Floats = np.zeros(n)
        self.device_bit: Ints = np.full(n, NO_BIT)  # bit numbers in the two indexes
        self.node_bit: Ints = np.full(n, NO_BIT)

    def waits(self, work_s: Floats, now: float) -> Floats:
        """Per row: seconds until a prompt of ``work_s`` that comes now would be begun."""
        if self._queues is not None:
            return self._queues.waits(self.names, work_s, now)
        return np.maximum(self.busy_until - now, 0.0)

    def wait(self, row: int, work_s: float, now: float) -> float:
        """The same for one row."""
        if self._queues is not None:
            return float(self._queues.waits(self.names, work_s, now)[row])
        return max(float(self.busy_until[row]) - now, 0.0)

    def ahead(self, at: float, window_s: float, tokens: int) -> Ahead:
        """Per row, decode workers only: what a prompt of ``tokens`` meets that joins at ``at``, during ``window_s``."""
        if self._courses is None:
            return DecodeForecast().ahead(self.names, at, window_s, tokens)
        return self._courses.ahead(self.names, at, window_s, tokens)

    def write(self, worker: Worker, coming: Coming) -> None:
        """Bring the row of ``worker`` up to date."""
        i = self.row[worker.member.id]
        self.busy_until[i] = worker.busy_until
        if worker.member.role is Role.PREFILL:
            self.load[i] = len(worker.attempts) + coming.jobs
        else:
            self.batch[i] = len(worker.attempts) + coming.sequences
            self.context[i] = sum(a.prompt_tokens + a.output_tokens for a in worker.attempts) + coming.context_tokens
            self.load[i] = self.batch[i]
        self.to_compute[i] = sum(worker.prompt_left(a) for a in worker.attempts) + coming.prefill_tokens
        self.room[i] = worker.free_tokens - coming.context_tokens
        self.last_chosen[i] = worker.last_chosen

    def write_fits(self, worker: Worker, prefill: Fit, step: Fit) -> None:
        i = self.row[worker.member.id]
        self.prefill_fit[:, i], self.prefill_spread[i] = prefill.coefficients, prefill.spread
        self.prefill_reach[i] = prefill.reach if prefill.sure else 0.0
        self.step_fit[:, i], self.step_spread[i] = step.coefficients, step.spread
        self.step_reach[i] = step.reach if step.sure else 0.0
