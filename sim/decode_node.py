"""A decode worker on the virtual clock: the production batcher and hand-off around a formula for the step time.

Steps are computed in runs (``Batcher.run_until_change``): from one join or leave to the next. A worker that computes
prompts itself (role ``both``, or after a preemption) goes step by step while it does.
"""

from __future__ import annotations

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, PeerSilent, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.landing import Landed, Landing, LandingSlot, SlotRef
from moonpool.core.membership import LiveAttempt, Member, PrefillTiming, StepTiming, WorkerReport
from moonpool.decode_worker.batcher import Admission, Batcher, Limits, Pace, Run, Step
from moonpool.decode_worker.handoff_sink import (
    Action,
    CancelPrefill,
    Copy,
    EmitFirst,
    EndLanding,
    Fail,
    HandoffSink,
    Join,
    ReleasePages,
    StopCopies,
)
from moonpool.decode_worker.sequence import Phase, Sequence
from moonpool.engine.pages import PagePool
from moonpool.kvstore.claims import LandingAsk, Life
from moonpool.prefill_worker.chunk_planner import JobKey
from moonpool.sim.attempt import TOKEN, Try, answer_keys
from moonpool.sim.clock import Timer
from moonpool.sim.cluster import Group
from moonpool.sim.costs import compute_s, step_s
from moonpool.sim.gaps import Gaps
from moonpool.sim.prefix import Prefix
from moonpool.sim.site import Site
from moonpool.sim.store_node import SESSION, StoreNode


class DecodeNode:
    def __init__(self, site: Site, member: Member, group: Group) -> None:
        cluster = site.cluster
        self.member = member
        self.alive = True
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
        self.jobs: dict[JobKey, Try] = {}
        self._site = site
        self._cost = cluster.decode
        self._prefill_cost = cluster.prefill
        self._size = cluster.model.block_tokens
        self._landings = 0
        self._run_from: float | None = None  # a run is under way since then; its steps are not told to the batcher yet
        self._step: tuple[Step, float] | None = None  # a single step, and its seconds
        self._factor = 1.0  # of the time of the run's steps
        self._timer: Timer | None = None  # the end of the run, of the step, or of the last step before a change
        self._fresh: list[tuple[Try, float]] = []  # in the batch from the next step on; since when it waits for that
        self._changed = False
        self._between = False  # in ``_boundary``: what changes is seen there
        self._prefills: list[PrefillTiming] = []
        self._steps: list[StepTiming] = []

    @property
    def _store(self) -> StoreNode:
        return self._site.stores[self.member.node]

    @property
    def token_limit(self) -> int:
        """Tokens at which a sequence ends whatever it asked for."""
        return min(self._site.cluster.model.max_context, self.pages.total * self._size)

    # -- attempts ------------------------------------------------------------------------------------------------------

    def begin(self, attempt: Try) -> None:
        """Busy: the queue is full."""
        self.batcher.add(attempt.sequence)
        self.jobs[attempt.key] = attempt
        self._interrupt()

    def cancel(self, attempt: Try) -> None:
        """Nobody wants its answer any more; a no-op once it has ended."""
        if self.jobs.get(attempt.key) is not attempt:
            return
        if attempt.sink is not None:
            self._perform(attempt, attempt.sink.cancelled())
        self._end(attempt)

    def _end(self, attempt: Try) -> None:
        self._interrupt()
        attempt.over = True
        self.batcher.end(attempt.sequence)
        self.jobs.pop(attempt.key, None)
        if attempt.prefix is not None and not attempt.sequence.remote:
            attempt.prefix.close()

    def _fill(self, admission: Admission) -> None:
        attempt = self.jobs[admission.sequence.name]
        if not admission.sequence.remote:
            self._load(attempt)
            return
        blocks = range(blocks_for(attempt.tokens, self._size)) if self._lands else range(1)
        attempt.sink = HandoffSink(attempt.request.id, attempt.number, 1, blocks)
        prefiller = self._site.prefillers.get(attempt.placement.prefill.id)
        peer = attempt.placement.prefill.id
        if prefiller is None or not prefiller.alive or prefiller.member.incarnation != attempt.placement.prefill.incarnation:
            self._perform(attempt, attempt.sink.failed(Failure(Reason.PEER_SILENT, f"{peer} is gone", peer)))
            return
        try:
            prefiller.submit(attempt)
        except Busy as e:
            self._perform(attempt, attempt.sink.failed(Failure(Reason.BUSY, e.message, peer)))

    def _load(self, attempt: Try) -> None:
        """The prompt is computed here: what the node's pool has of it comes first."""
        request, now = attempt.request, self._site.clock.now
        attempt.prefix = Prefix(self._store, self._site.links, request.keys, request.use, lambda: None)
        attempt.prefix.pin()
        tokens = len(attempt.sequence.tokens)
        cached = min(attempt.prefix.have * self._size, tokens - 1)
        if attempt.begun_at is None:
            attempt.begun_at, attempt.cached = now, cached
            self._site.front.begun(attempt)

        def loaded() -> None:
            if not attempt.over:
                self._interrupt()
                self.batcher.join(attempt.sequence, cached)
                self._fresh.append((attempt, self._site.clock.now))

        self._site.clock.after(self._prefill_cost.a + self._prefill_cost.d * cached, loaded)

    # -- what the prefill node tells -----------------------------------------------------------------------------------

    @property
    def _lands(self) -> bool:
        """Prompts land in this node's pool, block by block, and stay there; else they come as one piece, for once."""
        return self._site.cluster.keep != "prefill"

    def grant(self, attempt: Try) -> Landing:
        """Busy: the pool has no room now. PeerSilent: the pool is gone, or this worker."""
        placement, request = attempt.placement, attempt.request
        if attempt.over:
            raise PeerSilent(f"{placement.decode.id} has died", peer=placement.decode.id)
        if not self._lands:
            self._landings += 1
            slot = LandingSlot(0, SlotRef(0, 0, b""), min(attempt.tokens, self._size))
            name, number = attempt.sequence.name
            here, writer = self.member, placement.prefill.id
            return Landing(self._landings, name, number, here.node, here.incarnation, 0, writer, (slot,))
        if not self._store.alive:
            raise PeerSilent(f"no store node is live on {self.member.node}", peer=self._store.member.id)
        ask = LandingAsk(
            attempt.sequence.name[0],
            attempt.number,
            Life(placement.prefill.id, placement.prefill.incarnation),
            SESSION,
            self._store.layout,
            (*request.keys, *answer_keys(request.id, range(len(request.keys), attempt.tokens // self._size))),
            tail_valid=attempt.tokens % self._size,
            use=request.use,
        )
        return self._store.grant(ask)

    def prefill_begun(self, attempt: Try, landing: Landing) -> None:
        if attempt.sink is not None:
            self._perform(attempt, attempt.sink.begun(landing))

    def prefill_done(self, attempt: Try, first: FirstToken) -> None:
        if attempt.sink is None or attempt.over:
            return
        attempt.sequence.tokens.append(TOKEN)
        attempt.first_at = self._site.clock.now
        self._perform(attempt, attempt.sink.first_token(first, ends=first.ends_request))

    def landed(self, attempt: Try) -> None:
        landing = attempt.landing
        assert landing is not None
        if attempt.sink is None:
            return
        if self._lands:
            self._store.landed(landing)
        blocks = tuple(slot.block for slot in landing.slots)
        told = Landed(landing.id, attempt.sequence.name[0], attempt.number, 0, 0, blocks)
        self._perform(attempt, attempt.sink.landed(told))

    def drained(self, attempt: Try, drained: Drained) -> None:
        if attempt.sink is not None:
            self._perform(attempt, attempt.sink.drained(drained))

    def written(self, attempt: Try) -> None:
        """The writer's word to the store node that it writes no more."""
        prefill = attempt.placement.prefill
        if attempt.landing is not None and self._lands:
            self._store.written(attempt.landing, Life(prefill.id, prefill.incarnation))

    def prefill_failed(self, attempt: Try, failure: Failure) -> None:
        if attempt.sink is not None:
            self._perform(attempt, attempt.sink.failed(failure))

    def writer_gone(self, attempt: Try, failure: Failure) -> None:
        """The prefill worker has died: nothing more will come."""
        self.prefill_failed(attempt, failure)
        if self._lands and self._store.alive:
            prefill = attempt.placement.prefill
            self._store.pool.writer_gone(Life(prefill.id, prefill.incarnation), self._site.clock.now)
            self._store.flush()

    def _perform(self, attempt: Try, actions: list[Action]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case EmitFirst(_, ends):
                    self._site.front.first_token(attempt)
                    if ends:
                        self._finish(attempt)
                case Copy(layer, slots):
                    assert attempt.sink is not None
                    todo += attempt.sink.copied(layer, [slot.block for slot in slots])
                case Join():
                    self._interrupt()
                    self.batcher.join(attempt.sequence, attempt.tokens)
                    since = attempt.first_at if attempt.first_at is not None else self._site.clock.now
                    self._fresh.append((attempt, since))
                case EndLanding():
                    if self._lands and attempt.landing is not None:
                        self._store.read(attempt.landing)
                case CancelPrefill():
                    prefiller = self._site.prefillers.get(attempt.placement.prefill.id)
                    if prefiller is not None and prefiller.alive:
                        prefiller.cancel(attempt, Failure(Reason.CANCELLED, "the decode worker ended its call"))
                case Fail(failure):
                    attempt.over = True
                    self._site.front.failed(attempt, failure)
                case ReleasePages():
                    self._end(attempt)
                case StopCopies():
                    pass

    # -- the batch -----------------------------------------------------------------------------------------------------

    def _pace(self, batch: int) -> Pace:
        base_s = self._cost.base_s + self._cost.per_sequence_s * batch
        return Pace(self._factor * base_s, self._factor * self._cost.per_token_s)

    def _left(self, sequence: Sequence) -> int:
        return self.jobs[sequence.name].left

    def _interrupt(self) -> None:
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

    def _boundary(self) -> None:
        """Between two steps."""
        self._timer, self._between = None, True
        now = self._site.clock.now
        for attempt in [a for a in self.jobs.values() if a.sequence.phase is Phase.RUNNING and a.left <= 0]:
            self._finish(attempt)
        for admission in self.batcher.admit():
            self.batcher.copied(admission)
            self._fill(admission)
        for attempt, since in self._fresh:
            if not attempt.over:
                self._stamp(attempt, now - since)
        self._fresh.clear()
        self._between = False
        self._next(now)
        if self._changed:
            self._changed = False
            self.report()

    def _stamp(self, attempt: Try, waited_s: float) -> None:
        if attempt.joined_at is None:
            attempt.joined_at, attempt.pause_s = len(self.gaps), waited_s
            attempt.request.outcome.handoff_s = waited_s
        else:
            attempt.paused.append((len(self.gaps), waited_s))

    def _next(self, now: float) -> None:
        self._factor = self._site.noise.factor()
        run = self.batcher.steady(self._pace, self._left)
        if run is not None:
            self._run_from = now
            self._timer = self._site.clock.after(run.seconds, self._run_over)
            return
        preempted = self.batcher.preemptions
        step = self.batcher.plan()
        if self.batcher.preemptions != preempted:
            self._changed = True
            self._site.counters["preemptions"] += self.batcher.preemptions - preempted
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
        self._steps.append(StepTiming(run.batch, int(run.context + run.batch * middle), run.first_s + run.slope_s * middle))

    # -- steps with prompts in them ------------------------------------------------------------------------------------

    def _step_s(self, step: Step) -> float:
        decoding = [row for row in step.rows if row.end - row.start == 1]
        seconds = step_s(self._cost, len(decoding), sum(row.end for row in decoding)) if decoding else 0.0
        seconds += sum(compute_s(self._prefill_cost, r.start, r.end) for r in step.rows if r.end - r.start > 1)
        return self._factor * seconds

    def _step_over(self) -> None:
        assert self._step is not None
        (step, seconds), self._step, self._timer = self._step, None, None
        self.batcher.complete(step, [TOKEN if row.samples else None for row in step.rows])
        self.gaps.add(Run(1, len(step.rows), 0, seconds, 0.0))
        self._site.counters["decode_steps"] += 1
        for row in step.rows:
            attempt = self.jobs.get(row.sequence.name)
            if attempt is not None and row.samples and attempt.first_at is None:
                self._first_here(attempt)
        self._changed = True
        self._boundary()

    def _first_here(self, attempt: Try) -> None:
        """The first token of a prompt computed here."""
        now, request = self._site.clock.now, attempt.request
        assert attempt.begun_at is not None and attempt.prefix is not None
        attempt.first_at, attempt.joined_at = now, len(self.gaps)
        attempt.prefill_s = now - attempt.begun_at
        request.outcome.prefill_s += attempt.prefill_s
        self._prefills.append(PrefillTiming(attempt.tokens, attempt.cached, attempt.prefill_s, 0.0, attempt.cached))
        self._store.store(request.keys, request.use)
        attempt.prefix.close()
        self._site.front.first_token(attempt)

    def _finish(self, attempt: Try) -> None:
        waits = list(attempt.paused)
        if attempt.joined_at is not None:
            if self._cost.first_gap:
                waits.append((attempt.joined_at, attempt.pause_s))
            attempt.request.outcome.tbt_s = self.gaps.slowest_s(attempt.joined_at, len(self.gaps), waits)
        self._end(attempt)
        self._tell_end(attempt)
        self._site.front.finished(attempt)

    def _tell_end(self, attempt: Try) -> None:
        """Eviction learns from how long answers get, wherever the prompt is kept."""
        keep, placement = self._site.cluster.keep, attempt.placement
        at = {"prefill": (placement.prefill.node,), "decode": (placement.decode.node,)}
        for node in at.get(keep, (placement.prefill.node, placement.decode.node)):
            self._site.stores[node].ended(attempt.request.use, attempt.request.wanted)

    # -- what it tells -------------------------------------------------------------------------------------------------

    def report(self) -> None:
        prefills, steps = tuple(self._prefills), tuple(self._steps)
        self._prefills.clear()
        self._steps.clear()
        member, free = self.member, self.pages.free + self.pages.cached
        attempts = tuple(self._described(job) for job in self.jobs.values())
        self._site.teller.tell(WorkerReport(member.id, member.incarnation, attempts, free, self.pages.total, prefills, steps))

    def _described(self, job: Try) -> LiveAttempt:
        sequence, prompt = job.sequence, job.request.prompt_tokens
        produced = len(sequence.tokens) - prompt
        left = 0 if sequence.remote or sequence.left == 1 else sequence.left
        possible = max(self._site.cluster.promised_output - produced, 0)
        return LiveAttempt(job.request.id, job.number, prompt, possible, left, produced)

    @property
    def idle(self) -> bool:
        return not self.jobs

    def step_now(self) -> float:
        """Seconds of a step of the batch as it is, those on their way into it included."""
        context = sum(len(job.sequence.tokens) for job in self.jobs.values())
        return step_s(self._cost, len(self.jobs), context) if self.jobs else 0.0

    def die(self) -> list[Try]:
        """The process is gone with all it holds; returns the attempts that were here."""
        self.alive = False
        lost = list(self.jobs.values())
        if self._timer is not None:
            self._timer.cancel()
        if self._run_from is not None:
            self.batcher.run_until_change(self._pace, self._left, TOKEN, self._site.clock.now - self._run_from)
            self._run_from = None
        for job in lost:
            job.over, job.sink = True, None
            if self._lands and job.landing is not None:
                self._store.read(job.landing)
            if job.prefix is not None and not job.sequence.remote:
                job.prefix.close()
        self.jobs.clear()
        return lost
