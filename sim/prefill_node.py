"""A prefill worker on the virtual clock: the production queue, hand-off and device pages around a cost formula."""

from __future__ import annotations

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, PeerSilent
from moonpool.core.handoff import FirstToken
from moonpool.core.membership import LinkTiming, LiveAttempt, Member, PrefillTiming, WorkerReport
from moonpool.core.placement import Source
from moonpool.core.request import Sampled
from moonpool.engine.pages import OutOfPages, PagePool
from moonpool.prefill_worker.chunk_planner import ChunkPlanner, JobKey
from moonpool.prefill_worker.handoff_source import (
    State,
)
from moonpool.sim.attempt import TOKEN, Try
from moonpool.sim.clock import Timer
from moonpool.sim.cluster import Group
from moonpool.sim.costs import compute_s, prefill_s, tokens_left
from moonpool.sim.prefix import Prefix
from moonpool.sim.sending import Sending
from moonpool.sim.site import Site
from moonpool.sim.span_receiver import SpanReceiver
from moonpool.sim.store_node import StoreNode

WHOLE = 1 << 40  # tokens in a chunk where prompts are computed whole
AGE_MS = 1_000


class PrefillNode:
    def __init__(self, site: Site, member: Member, group: Group) -> None:
        cluster = site.cluster
        self.member = member
        self.alive = True
        self.ready = True
        self.pages = PagePool(max(group.device_tokens // cluster.model.block_tokens, 1))
        self.planner = ChunkPlanner(
            queue_limit=cluster.queue_limit,
            age_ms=AGE_MS,
            chunk_tokens=cluster.prefill.chunk_tokens or WHOLE,
            block_tokens=cluster.model.block_tokens,
            order=cluster.order,
            age_weight=cluster.age,
            wait_cap_s=cluster.wait_cap_s,
        )
        self.jobs: dict[JobKey, Try] = {}
        self.backlog_s = 0.0  # predicted work of the jobs that wait
        self._works: dict[JobKey, float] = {}
        self._site = site
        self._size = cluster.model.block_tokens
        self._cost = cluster.prefill
        self.receiver = SpanReceiver(site, member, self)
        self._sending = Sending(site, member.node, self._broke, self._quiet)
        self._timings: list[PrefillTiming] = []
        self._links: list[LinkTiming] = []
        self._computing: Try | None = None
        self._ends_at = 0.0  # when the compute of the running job ends, were all its blocks there
        self._factor = 1.0  # of the running job's time
        self._timer: Timer | None = None
        self._wake: Timer | None = None

    @property
    def _store(self) -> StoreNode:
        return self._site.stores[self.member.node]

    # -- what decode nodes ask -----------------------------------------------------------------------------------------

    def submit(self, attempt: Try) -> None:
        if attempt.placement.helpers:
            self.jobs[attempt.key] = attempt
            try:
                self.receiver.ask(attempt)
            except Busy:
                del self.jobs[attempt.key]
                raise
            return
        self._queue(attempt, prefill_s(self._cost, attempt.tokens, self._expected(attempt)))
        self.jobs[attempt.key] = attempt
        request = attempt.request
        keys, use = request.keys[: attempt.tokens // self._size], request.use
        attempt.prefix = Prefix(self._store, self._site.links, keys, use, lambda: self._arrived(attempt))
        if self._cost.early:
            self._bring(attempt)
        self._go()

    def _queue(self, attempt: Try, work: float) -> None:
        """Busy: the queue is full."""
        now, lane, tenant = self._site.clock.now, attempt.placement.decode.node, attempt.request.use.tenant
        self.planner.submit(attempt.key, attempt.tokens, lane, now, work, tenant=tenant)
        attempt.queued_at = now
        self._works[attempt.key] = work
        self.backlog_s += work

    # -- of a group --------------------------------------------------------------------------------------------------

    def queue_span(self, attempt: Try) -> None:
        if attempt.key in self.jobs:
            attempt.prefix = Prefix(self._store, self._site.links, (), attempt.request.use, lambda: None)
            self._queue(attempt, prefill_s(self._cost, attempt.tokens, attempt.begin))
            self._go()

    def before_here(self, attempt: Try) -> None:
        """The last layer is computed after that."""
        if self._computing is attempt:
            self._ends_at = max(self._ends_at, self._site.clock.now + attempt.layer_s)
            self._timer = self._site.clock.at(self._ends_at, lambda: self._computed(attempt))

    def before_lost(self, attempt: Try, failure: Failure) -> None:
        if attempt.key in self.jobs and not attempt.source.stop:
            self._sending.perform(attempt, attempt.source.failed(failure))
            self._stop(attempt)
            self._go()
            self.report()

    # -- what decode nodes ask, too ------------------------------------------------------------------------------------

    def cancel(self, attempt: Try, why: Failure) -> None:
        """A no-op once it has ended."""
        if attempt.key in self.jobs and not attempt.source.stop:
            self._sending.perform(attempt, attempt.source.cancelled(why))
            self._stop(attempt)
            self._go()
            if attempt.after is not None:
                self.report()  # the conductor knows of it by no other way

    def _expected(self, attempt: Try) -> int:
        """Tokens that need not be computed, going by the placement."""
        blocks = sum(s.count for s in attempt.placement.segments if s.source is not Source.RECOMPUTE)
        return min(blocks * self._size, attempt.tokens - 1)

    def _bring(self, attempt: Try) -> None:
        prefix = attempt.prefix
        if prefix is not None:
            prefix.pin()
            prefix.bring(attempt.placement.segments, self._site.stores)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Take up the next job, where none is under way."""
        if not self.alive:
            return
        begun = False
        while (key := self.planner.next(self._site.clock.now)) is not None:
            begun = self._begin(self.jobs[key]) or begun
        if begun:
            self.report()
        at = self.planner.next_at()
        if at is not None and (self._wake is None or self._wake.call is None or self._wake.when > at):
            self._wake = self._site.clock.at(max(at, self._site.clock.now), self._woken)

    def _woken(self) -> None:
        self._wake = None
        self._go()

    def _begin(self, attempt: Try) -> bool:
        """Pages and landing, or back into the queue."""
        now, decoder = self._site.clock.now, self._site.decoders[attempt.placement.decode.id]
        try:
            attempt.pages = self.pages.allocate(blocks_for(attempt.tokens, self._size))
            landing = decoder.grant(attempt)
        except (OutOfPages, Busy):
            self.pages.release(attempt.pages)
            attempt.pages = []
            self._site.counters["prefill_skips"] += 1
            self.planner.refused(attempt.key, now)
            return False
        except PeerSilent as e:
            self._sending.perform(attempt, attempt.source.failed(Failure.of(e)))
            self._stop(attempt)
            return False
        attempt.landing, attempt.begun_at = landing, now
        self.backlog_s -= self._works.pop(attempt.key)
        if attempt.before is None:
            self._site.front.begun(attempt)
        self._sending.perform(attempt, attempt.source.granted(landing))
        assert attempt.prefix is not None
        if self._cost.early:
            attempt.prefix.pin()  # more may have come to lie here while the job waited
        elif attempt.before is None:
            self._bring(attempt)
        self._computing = attempt
        have, first, end = attempt.prefix.reused()
        start = (have if first > have else end) * self._size if attempt.before is None else attempt.begin
        self.planner.granted(attempt.key, min(start, attempt.tokens - 1))
        self._schedule(attempt, now)
        self._sending.open(attempt, self._ends_at - now)
        return True

    # -- computing -----------------------------------------------------------------------------------------------------

    def _schedule(self, attempt: Try, begun: float) -> None:
        """When the job ends. What is still coming is waited for: with overlap by the last layer, else by all of the rest."""
        front, rest, loaded, computed = self._work(attempt)
        attempt.cached = attempt.tokens - computed
        self._factor = self._site.noise.factor()
        work = self._factor * (self._cost.a + front + rest + self._cost.d * loaded)
        attempt.layer_s = work / self._site.cluster.model.layers
        attempt.computes_at = begun if attempt.before is None else begun + self.receiver.behind_s(attempt)
        self._ends_at = attempt.computes_at + work
        assert attempt.prefix is not None
        if attempt.before is not None:
            if attempt.before.handed_on:
                self.before_here(attempt)
            return  # else ``before_here`` goes on
        if attempt.prefix.pending:
            return  # ``_arrived`` goes on
        self._timer = self._site.clock.at(self._ends_at, lambda: self._computed(attempt))

    def _work(self, attempt: Try) -> tuple[float, float, int, int]:
        """Seconds before and after the blocks that are fetched; tokens loaded, and computed."""
        assert attempt.prefix is not None
        if attempt.before is not None:
            begin = attempt.begin
            seconds = self._cost.span_factor * compute_s(self._cost, begin, attempt.tokens)
            return 0.0, seconds, begin, attempt.tokens - begin
        have, first, end = (min(blocks * self._size, attempt.tokens - 1) for blocks in attempt.prefix.reused())
        front = compute_s(self._cost, have, first)
        rest = compute_s(self._cost, end, attempt.tokens) * (self._cost.span_factor if attempt.after is not None else 1.0)
        computed = first - have + attempt.tokens - end
        return front, rest, attempt.tokens - computed, computed

    def _arrived(self, attempt: Try) -> None:
        """The blocks on their way are there, or lost: what is lost is computed."""
        prefix = attempt.prefix
        assert prefix is not None
        self._links += prefix.timings
        prefix.timings.clear()
        if self._computing is not attempt or attempt.begun_at is None or prefix.pending:
            return
        now = self._site.clock.now
        front, rest, loaded, computed = self._work(attempt)
        if attempt.tokens - computed < attempt.cached:
            self._site.counters["fetches_lost"] += 1
            start = min(prefix.reused()[0] * self._size, attempt.tokens - 1)
            if attempt.tokens - start > self.planner.remaining(attempt.key):
                self.planner.restart(attempt.key, start)
            attempt.cached = attempt.tokens - computed
            self._ends_at = now + self._factor * (front + rest + self._cost.d * loaded)
        elif self._cost.overlap and not front:
            last = (self._ends_at - attempt.begun_at) / self._site.cluster.model.layers
            self._ends_at = max(self._ends_at, now + last)
        else:
            self._ends_at = max(self._ends_at, now + self._ends_at - attempt.begun_at - self._factor * front)
        self._timer = self._site.clock.at(max(self._ends_at, now), lambda: self._computed(attempt))

    def _computed(self, attempt: Try) -> None:
        now = self._site.clock.now
        self._timer = self._computing = None
        assert attempt.begun_at is not None and attempt.prefix is not None
        attempt.prefill_s = now - attempt.begun_at
        attempt.request.outcome.prefill_s += attempt.prefill_s
        loaded = attempt.cached
        wait = max(attempt.prefill_s - self._factor * prefill_s(self._cost, attempt.tokens, loaded), 0.0)
        fetch = wait if attempt.before is not None else 0.0  # not its own doing: of a group it waits for the one before
        timing = PrefillTiming(attempt.tokens, loaded, attempt.prefill_s, wait, loaded, fetch)
        self._timings.append(timing)
        self._run_chunks(attempt)
        attempt.prefix.computed()
        if self._site.cluster.keep != "decode" and attempt.after is None:
            self._store.store(attempt.request.keys, attempt.request.use)
        attempt.prefix.close()
        self.planner.leave(attempt.key)
        refusal = None if attempt.after is not None else self._site.teller.prefilled(attempt.request.id)
        if refusal is not None:
            self._site.front.refused(attempt, refusal)
        else:
            ends = attempt.tokens + 1 >= attempt.ends_at
            first = FirstToken(Sampled(TOKEN), min(attempt.found, attempt.request.prompt_tokens), ends, timing)
            self._sending.perform(attempt, attempt.source.sampled(first))
        before = self._computing
        self._go()
        if self._computing is before:
            self.report()

    def _run_chunks(self, attempt: Try) -> None:
        """All chunks of the job, which no other job can come between, at its end."""
        last = False
        while not last:
            chunk = self.planner.chunk(attempt.key)
            self.planner.computed(attempt.key, chunk)
            self._sending.computed(attempt, chunk)
            last = chunk.last

    def _broke(self, attempt: Try) -> None:
        self._stop(attempt)
        self._go()

    def _quiet(self, attempt: Try) -> None:
        """Nobody computes on its pages or sends them any more."""
        pages, attempt.pages = attempt.pages, []
        self.pages.release(pages)
        self.jobs.pop(attempt.key, None)

    def _stop(self, attempt: Try) -> None:
        """Its compute ends at once, and it leaves the queue."""
        if self._computing is attempt:
            self._computing = None
            assert attempt.begun_at is not None
            spent = self._site.clock.now - attempt.begun_at
            attempt.prefill_s += spent
            attempt.request.outcome.prefill_s += spent
            if self._timer is not None:
                self._timer.cancel()
        self.planner.leave(attempt.key)
        self.backlog_s -= self._works.pop(attempt.key, 0.0)
        if attempt.prefix is not None:
            attempt.prefix.close()
        self.receiver.let_go(attempt)
        if attempt.source.state is State.ABANDONING:
            self._sending.perform(attempt, attempt.source.stopped())

    # -- what it tells -------------------------------------------------------------------------------------------------

    def report(self) -> None:
        prefills, links = tuple(self._timings), tuple(self._links)
        self._timings.clear()
        self._links.clear()
        attempts = tuple(
            LiveAttempt(job.request.id, job.number, job.tokens, self._left(job), running=job is self._computing)
            for job in self.jobs.values()
        )
        free = self.pages.free + self.pages.cached
        member = self.member
        self._site.teller.tell(
            WorkerReport(member.id, member.incarnation, attempts, free, self.pages.total, prefills, links=links)
        )

    def _left(self, job: Try) -> int:
        if job is not self._computing:
            waits = job.before is not None and job.prefix is None
            return job.tokens - job.begin if waits else self.planner.remaining(job.key)
        return tokens_left(self._cost, job.tokens, max(self._ends_at - self._site.clock.now - self._cost.a, 0.0))

    @property
    def idle(self) -> bool:
        return not self.jobs

    def backlog(self) -> float:
        """Predicted seconds until a prompt that comes now would be begun."""
        running = max(self._ends_at - self._site.clock.now, 0.0) if self._computing is not None else 0.0
        return self.backlog_s + running

    def die(self) -> list[Try]:
        """The process is gone with all it holds; returns the attempts that were here."""
        self.alive = False
        lost = list(self.jobs.values())
        for timer in (self._timer, self._wake):
            if timer is not None:
                timer.cancel()
        for job in lost:
            if job.flow is not None:
                self._site.links.stop(job.flow)
                job.flow = None
            if job.prefix is not None:
                job.prefix.close()
        self.jobs.clear()
        self._computing = None
        return lost
