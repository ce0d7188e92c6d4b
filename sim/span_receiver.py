"""A prefill node in a group, towards the one before it: asks it to compute what lies before its own span, and takes that in.

A worker's span is to its predecessor what a decode worker is: the predecessor computes the prompt up to there, pushes layer by
layer, and samples nothing that anybody wants. What comes is taken into device pages as one piece.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from moonpool.core.errors import Busy, Failure, PeerSilent, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import RequestId
from moonpool.core.landing import Landing, LandingSlot, SlotRef
from moonpool.core.membership import Member
from moonpool.prefill_worker.handoff_source import HandoffSource
from moonpool.sim.attempt import Try
from moonpool.sim.site import Site


class Owner(Protocol):
    """The prefill node itself."""

    alive: bool

    def queue_span(self, attempt: Try) -> None:
        """The worker before has begun: this one may. Busy: the queue is full."""

    def before_here(self, attempt: Try) -> None:
        """All that lies before the span of ``attempt`` has come."""

    def before_lost(self, attempt: Try, failure: Failure) -> None: ...


class SpanReceiver:
    """A ``site.Decoder`` by its face."""

    def __init__(self, site: Site, member: Member, owner: Owner) -> None:
        self.member = member
        self._site = site
        self._owner = owner
        self._landings = 0

    @property
    def alive(self) -> bool:
        return self._owner.alive

    # -- asking the one before -----------------------------------------------------------------------------------------

    def ask(self, attempt: Try) -> None:
        """This node queues only once the one before has begun, so that no two groups wait for each other. Busy: the queue of
        one of them is full."""
        before = attempt.before = _job_before(attempt, self._site.cluster.model.block_tokens)
        helper = before.placement.prefill
        node = self._site.prefillers.get(helper.id)
        if node is not None and node.alive and node.member.incarnation == helper.incarnation:
            node.submit(before)
            return
        failure = Failure(Reason.PEER_SILENT, f"{helper.id} is gone", helper.id)
        self._site.clock.after(0.0, lambda: self._owner.before_lost(attempt, failure))

    def let_go(self, attempt: Try) -> None:
        """Nobody wants what was asked; a no-op once it has ended."""
        before = attempt.before
        node = None if before is None else self._site.prefillers.get(before.placement.prefill.id)
        if before is not None and node is not None and node.alive:
            node.cancel(before, Failure(Reason.CANCELLED, "the group has ended"))

    def behind_s(self, attempt: Try) -> float:
        """From now until the first layer of what lies before has come, if it comes as fast as it is computed."""
        before = attempt.before
        assert before is not None
        link = self._site.cluster.link
        hop = before.tokens * self._site.token_bytes / link.bytes_per_s / self._site.cluster.model.layers
        here = before.computes_at + before.layer_s + hop + link.latency_s
        return max(here - self._site.clock.now, 0.0)

    # -- what the one before tells -------------------------------------------------------------------------------------

    def grant(self, attempt: Try) -> Landing:
        if not self.alive or _after(attempt).source.stop:
            raise PeerSilent(f"{self.member.id} has died", peer=self.member.id)
        self._landings += 1
        slot = LandingSlot(0, SlotRef(0, 0, b""), 1)
        here, writer = self.member, attempt.placement.prefill.id
        request = RequestId(attempt.request.id)
        return Landing(self._landings, request, attempt.number, here.node, here.incarnation, 0, writer, (slot,))

    def prefill_begun(self, attempt: Try, landing: Landing) -> None:
        self._site.clock.after(0.0, lambda: self._may_begin(_after(attempt)))  # once it is known how long that one takes

    def _may_begin(self, after: Try) -> None:
        if after.source.stop:
            return
        try:
            self._owner.queue_span(after)
        except Busy as e:
            self._owner.before_lost(after, Failure(Reason.BUSY, e.message, self.member.id))

    def prefill_done(self, attempt: Try, first: FirstToken) -> None:
        pass  # nobody wants its token

    def landed(self, attempt: Try) -> None:
        attempt.handed_on = True
        self._owner.before_here(_after(attempt))

    def drained(self, attempt: Try, drained: Drained) -> None:
        pass

    def written(self, attempt: Try) -> None:
        pass

    def prefill_failed(self, attempt: Try, failure: Failure) -> None:
        self._owner.before_lost(_after(attempt), failure)

    def writer_gone(self, attempt: Try, failure: Failure) -> None:
        self._owner.before_lost(_after(attempt), failure)


def _job_before(attempt: Try, block_tokens: int) -> Try:
    """What the last of its helpers is asked: the prompt up to where the span of ``attempt`` begins."""
    placement = attempt.placement
    helper = placement.helpers[-1]
    asked = replace(placement, prefill=helper.worker, decode=placement.prefill, helpers=placement.helpers[:-1])
    tokens = helper.until * block_tokens
    source = HandoffSource(attempt.request.id, attempt.number, 1)
    return Try(attempt.request, attempt.number, asked, attempt.sequence, source, tokens, tokens, after=attempt)


def _after(attempt: Try) -> Try:
    assert attempt.after is not None
    return attempt.after
