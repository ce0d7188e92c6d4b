"""The steps of a decode worker on the virtual clock: the production batcher around a formula for the step time.

Steps are done in runs (``Batcher.run_until_change``): from one join or leave to the next. While a prompt is computed here
(role ``both``, or after a preemption) they go one by one.
"""

from __future__ import annotations

from typing import Protocol

from moonpool.core.membership import StepTiming
from moonpool.decode_worker.batcher import Admission, Batcher, Limits, Step
from moonpool.decode_worker.runs import Pace, Run
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.engine.pages import PagePool
from moonpool.prefill_worker.chunk_planner import JobKey
from moonpool.sim.attempt import TOKEN, Try
from moonpool.sim.clock import Timer
from moonpool.sim.cluster import Group
from moonpool.sim.costs import compute_s, step_s
from moonpool.sim.gaps import Gaps
from moonpool.sim.site import Site


class StepOwner(Protocol):
    def fill(self, admission: Admission) -> None:
        """The sequence has pages: bring its KV in, then ``join`` it."""

    def first_here(self, attempt: Try) -> None:
        """The first token of a prompt computed here."""

    def has_all(self, attempt: Try) -> None:
        """It has its last token: ``end`` it."""

    def report(self) -> None:
        """Somebody came or left."""


class Steps:
    def __init__(self, site: Site, group: Group, jobs: dict[JobKey, Try], owner: StepOwner) -> None:
        """``jobs``: the attempts of all sequences in the batcher, kept by the owner."""
        cluster = site.cluster
        self.pages = PagePool(max(group.device_tokens // cluster.model.block_tokens, 1))
        self.batcher = Batcher(
            self.pages,
            Limits(
                block_tokens=cluster.model.block_tokens,
                max_batch=cluster.decode.max_batch,
                chunk_tokens=cluster.decode.chunk_tokens,
                growth_reserve=cluster.decode.growth_reserve,
                queue_limit=cluster.queue_limit,
                reuse=False,
            ),
        )
        self.gaps = Gaps()
        self.timings: list[StepTiming] = []
        self._site, self._jobs, self._owner = site, jobs, owner
        self._cost = cluster.decode
        self._run_from: float | None = None  # a run is under way since then; its steps are not told to the batcher yet
        self._step: tuple[Step, float] | None = None  # a single step, and its seconds
        self._factor = 1.0  # of the time of the run's steps
        self._timer: Timer | None = None  # the end of the run, of the step, or of the last step before a change
        self._fresh: list[tuple[Try, float]] = []  # in the batch from the next step on; since when it waits for that
        self._changed = False
        self._between = False  # in ``_boundary``: what changes is seen there

    def add(self, attempt: Try) -> None:
        """Busy: the queue is full. The attempt is to be among ``jobs``."""
        self.batcher.add(attempt.sequence)
        self.interrupt()

    def join(self, attempt: Try, computed: int, since: float) -> None:
        """The KV of ``computed`` tokens is in its pages; it waits for its next token since ``since``."""
        self.interrupt()
        self.batcher.join(attempt.sequence, computed)
        self._fresh.append((attempt, since))

    def end(self, attempt: Try) -> None:
        self.interrupt()
        self.batcher.end(attempt.sequence)

    def interrupt(self) -> None:
        """Somebody comes or goes: the batch changes when the step under way has ended, at once where there is none."""
        self._changed = True
        if self._between:
            return
        clock = self._site.clock
        if self._run_from is not None:
            begun, self._run_from = self._run_from, None
            assert self._timer is not None
            self._timer.cancel()
            at = clock.now
            if at > begun:
                run, _ = self.batcher.run_until_change(self._pace, self._left, TOKEN, at - begun)
                assert run is not None
                self._ran(run)
                at = max(begun + run.seconds, at)
            self._timer = clock.at(at, self._boundary)
        elif self._timer is None:
            self._timer = clock.after(0.0, self._boundary)

    def stop(self) -> None:
        """The process is gone; sequences have the tokens of the steps begun until now."""
        if self._timer is not None:
            self._timer.cancel()
        if self._run_from is not None:
            self.batcher.run_until_change(self._pace, self._left, TOKEN, self._site.clock.now - self._run_from)
            self._run_from = None

    def seconds_now(self) -> float:
        """Of a step of the batch as it is, those on their way into it included."""
        context = sum(len(job.sequence.tokens) for job in self._jobs.values())
        return step_s(self._cost, len(self._jobs), context) if self._jobs else 0.0

    # -- from step to step ---------------------------------------------------------------------------------------------

    def _pace(self, batch: int) -> Pace:
        base_s = self._cost.base_s + self._cost.per_sequence_s * batch
        return Pace(self._factor * base_s, self._factor * self._cost.per_token_s)

    def _left(self, sequence: Sequence) -> int:
        return self._jobs[sequence.name].left

    def _boundary(self) -> None:
        """Between two steps."""
        self._timer, self._between = None, True
        now = self._site.clock.now
        for attempt in [a for a in self._jobs.values() if a.sequence.phase is Phase.RUNNING and a.left <= 0]:
            self._owner.has_all(attempt)
        for admission in self.batcher.admit():
            self.batcher.copied(admission)
            self._owner.fill(admission)
        for attempt, since in self._fresh:
            if not attempt.over:
                self._stamp(attempt, now - since)
        self._fresh.clear()
        self._between = False
        self._next(now)
        if self._changed:
            self._changed = False
            self._owner.report()

    def _stamp(self, attempt: Try, waited_s: float) -> None:
        """It gets a token from the next step on, unless it computes its prompt first."""
        if attempt.sequence.left > 1:
            return
        attempt.joined_at = len(self.gaps)
        if attempt.preempted_at is not None:
            attempt.paused.append((len(self.gaps), self._site.clock.now - attempt.preempted_at))
            attempt.preempted_at = None
        elif attempt.first_at is not None:
            attempt.pause_s = attempt.request.outcome.handoff_s = waited_s

    def _note_preempted(self) -> None:
        for attempt in self._jobs.values():
            if attempt.sequence.phase is Phase.WAITING and attempt.joined_at is not None:
                attempt.spans.append((attempt.joined_at, len(self.gaps)))
                attempt.joined_at, attempt.preempted_at = None, self._site.clock.now

    def _next(self, now: float) -> None:
        self._factor = self._site.noise.factor()
        begins = any(job.first_at is None and job.sequence.phase is Phase.RUNNING for job in self._jobs.values())
        run = None if begins else self.batcher.steady(self._pace, self._left)
        if run is not None:
            self._run_from = now
            self._timer = self._site.clock.after(run.seconds, self._run_over)
            return
        preempted = self.batcher.preemptions
        step = self.batcher.plan()
        if self.batcher.preemptions != preempted:
            self._changed = True
            self._site.counters["preemptions"] += self.batcher.preemptions - preempted
            self._note_preempted()
        if step is not None:
            seconds = self._step_s(step)
            self._step = step, seconds
            self._timer = self._site.clock.after(seconds, self._step_over)

    def _run_over(self) -> None:
        self._run_from = self._timer = None
        run, _ = self.batcher.run_until_change(self._pace, self._left, TOKEN)
        assert run is not None
        self._ran(run)
        self._changed = True
        self._boundary()

    def _ran(self, run: Run) -> None:
        self.gaps.add(run)
        self._site.counters["decode_steps"] += run.steps
        middle = (run.steps - 1) / 2
        self.timings.append(StepTiming(run.batch, int(run.context + run.batch * middle), run.first_s + run.slope_s * middle))

    # -- steps with prompts in them ------------------------------------------------------------------------------------

    def _step_s(self, step: Step) -> float:
        decoding = [row for row in step.rows if row.end - row.start == 1]
        seconds = step_s(self._cost, len(decoding), sum(row.end for row in decoding)) if decoding else 0.0
        prefill = self._site.cluster.prefill
        seconds += sum(compute_s(prefill, row.start, row.end) for row in step.rows if row.end - row.start > 1)
        return self._factor * seconds

    def _sampled(self, attempt: Try, seconds: float) -> None:
        """In a step of ``seconds`` that has just ended."""
        if attempt.first_at is None:
            attempt.joined_at = len(self.gaps)
            self._owner.first_here(attempt)
        elif attempt.joined_at is None:  # its prompt was computed again after a preemption
            attempt.joined_at = len(self.gaps) - 1
            since = attempt.preempted_at if attempt.preempted_at is not None else attempt.first_at
            attempt.paused.append((attempt.joined_at, self._site.clock.now - since - seconds))
            attempt.preempted_at = None

    def _step_over(self) -> None:
        assert self._step is not None
        (step, seconds), self._step, self._timer = self._step, None, None
        self.batcher.complete(step, [TOKEN if row.samples else None for row in step.rows])
        self.gaps.add(Run(1, len(step.rows), 0, seconds, 0.0))
        self._site.counters["decode_steps"] += 1
        for row in step.rows:
            attempt = self._jobs.get(row.sequence.name)
            if attempt is not None and row.samples:
                self._sampled(attempt, seconds)
        self._changed = True
        self._boundary()
