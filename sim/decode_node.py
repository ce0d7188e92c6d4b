"""A decode worker on the virtual clock: attempts, the production hand-off, and their steps."""

from __future__ import annotations

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, PeerSilent, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.landing import Landed, Landing, LandingSlot, SlotRef
from moonpool.core.membership import LiveAttempt, Member, PrefillTiming, WorkerReport
from moonpool.decode_worker.batcher import Admission
from moonpool.engine.pages import PagePool
from moonpool.kvstore.claims import LandingAsk, Life
from moonpool.kvstore.handoffs.sink import (
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
from moonpool.prefill_worker.chunk_planner import JobKey
from moonpool.sim.attempt import TOKEN, Try, answer_keys
from moonpool.sim.cluster import Group
from moonpool.sim.prefix import Prefix
from moonpool.sim.site import Site
from moonpool.sim.steps import Steps
from moonpool.sim.store_node import SESSION, StoreNode


class DecodeNode:
    def __init__(self, site: Site, member: Member, group: Group) -> None:
        cluster = site.cluster
        self.member = member
        self.alive = True
        self.jobs: dict[JobKey, Try] = {}
        self._site = site
        self._cost = cluster.decode
        self._prefill_cost = cluster.prefill
        self._size = cluster.model.block_tokens
        self._landings = 0
        self.steps = Steps(site, group, self.jobs, self)
        self._prefills: list[PrefillTiming] = []

    @property
    def _store(self) -> StoreNode:
        return self._site.stores[self.member.node]

    @property
    def pages(self) -> PagePool:
        return self.steps.pages

    @property
    def token_limit(self) -> int:
        """Tokens at which a sequence ends whatever it asked for."""
        return min(self._site.cluster.model.max_context, self.pages.total * self._size)

    # -- attempts ------------------------------------------------------------------------------------------------------

    def begin(self, attempt: Try) -> None:
        """Busy: the queue is full."""
        self.steps.add(attempt)
        self.jobs[attempt.key] = attempt

    def cancel(self, attempt: Try) -> None:
        """Nobody wants its answer any more; a no-op once it has ended."""
        if self.jobs.get(attempt.key) is not attempt:
            return
        if attempt.sink is not None:
            self._perform(attempt, attempt.sink.cancelled())
        self._end(attempt)

    def _end(self, attempt: Try) -> None:
        attempt.over = True
        self.steps.end(attempt)
        self.jobs.pop(attempt.key, None)
        if attempt.prefix is not None and not attempt.sequence.remote:
            attempt.prefix.close()

    def fill(self, admission: Admission) -> None:
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
                self.steps.join(attempt, cached, self._site.clock.now)

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
                        self.has_all(attempt)
                case Copy(layer, slots):
                    assert attempt.sink is not None
                    todo += attempt.sink.copied(layer, [slot.block for slot in slots])
                case Join():
                    since = attempt.first_at if attempt.first_at is not None else self._site.clock.now
                    self.steps.join(attempt, attempt.tokens, since)
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

    # -- what the steps tell --------------------------------------------------------------------------------------------

    def first_here(self, attempt: Try) -> None:
        """The first token of a prompt computed here."""
        now, request = self._site.clock.now, attempt.request
        assert attempt.begun_at is not None and attempt.prefix is not None
        attempt.first_at = now
        attempt.prefill_s = now - attempt.begun_at
        request.outcome.prefill_s += attempt.prefill_s
        self._prefills.append(PrefillTiming(attempt.tokens, attempt.cached, attempt.prefill_s, 0.0, attempt.cached))
        self._store.store(request.keys, request.use)
        attempt.prefix.close()
        self._site.front.first_token(attempt)

    def has_all(self, attempt: Try) -> None:
        """Its last token came."""
        gaps, waits, spans = self.steps.gaps, list(attempt.paused), list(attempt.spans)
        if attempt.joined_at is not None:
            spans.append((attempt.joined_at, len(gaps)))
        if self._cost.first_gap and spans:
            waits.append((spans[0][0], attempt.pause_s))
        attempt.request.outcome.tbt_s = gaps.slowest_s(spans, waits)
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
        prefills, steps = tuple(self._prefills), tuple(self.steps.timings)
        self._prefills.clear()
        self.steps.timings.clear()
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

    def die(self) -> list[Try]:
        """The process is gone with all it holds; returns the attempts that were here."""
        self.alive = False
        lost = list(self.jobs.values())
        self.steps.stop()
        for job in lost:
            job.over, job.sink = True, None
            if self._lands and job.landing is not None:
                self._store.read(job.landing)
            if job.prefix is not None and not job.sequence.remote:
                job.prefix.close()
        self.jobs.clear()
        return lost
