"""Requests from arrival to their last token: asks the conductor, begins attempts, begins the next one where one fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from moonpool.core.errors import Busy, Failure, Reason
from moonpool.core.ids import MemberId
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.actions import Bound
from moonpool.sim.attempt import NoHasher, SimRequest, Try, new_try
from moonpool.sim.brain import Brain
from moonpool.sim.clock import Clock
from moonpool.sim.cluster import SimCluster
from moonpool.sim.decode_node import DecodeNode

RETRY_S = 0.1  # a request that found no path is placed again after this, as long as it has attempts left
NO_PATH_TRIES = 100


class Gateway:
    def __init__(self, cluster: SimCluster, clock: Clock, counters: Counter[str]) -> None:
        self.brain: Brain
        self.decoders: dict[MemberId, DecodeNode] = {}
        self.waiting: dict[str, SimRequest] = {}  # for the conductor's answer
        self.open = 0  # requests that arrived and have not ended
        self.unbegun = 0  # of those, whose prefill has not begun
        self.ended = 0
        self.on_end: Callable[[], None] = lambda: None
        self._cluster = cluster
        self._clock = clock
        self._counters = counters
        self._hasher = NoHasher(cluster.model.block_tokens)
        wanted = cluster.targets
        self._targets = Targets(wanted.ttft_s * 1e3, wanted.tbt_s * 1e3) if wanted.sent else Targets()

    def arrive(self, request: SimRequest) -> None:
        self.open += 1
        self.unbegun += 1
        request.deadline = self._clock.after(self._cluster.budget_s, lambda: self._late(request))
        self._place(request)

    def _place(self, request: SimRequest, tries: int = 0) -> None:
        if request.over:
            return
        request.attempts += 1
        request.outcome.attempts = request.attempts
        asked = PlaceRequest(
            request.id,
            request.attempts,
            request.keys,
            request.prompt_tokens + request.emitted,
            max(self._cluster.promised_output, request.wanted),
            self._targets,
            request.use.tenant,
            tuple(MemberId(name) for name in request.exclude),
            turn=request.use.turn,
            kind=request.use.kind,
        )
        answer = self.brain.place(asked)
        if isinstance(answer, Later):
            self.waiting[request.id] = request
        else:
            self._answered(request, answer, tries)

    def bound(self, action: Bound) -> None:
        request = self.waiting.pop(action.request, None)
        if request is not None and request.attempts == action.attempt:
            self._answered(request, action.answer, 0)

    def _answered(self, request: SimRequest, answer: Placement | Refusal, tries: int) -> None:
        if isinstance(answer, Placement):
            self._begin(request, answer)
        elif answer.reason is Reason.NO_PATH and tries < NO_PATH_TRIES:
            request.attempts -= 1
            self._clock.after(RETRY_S, lambda: self._place(request, tries + 1))
        else:
            self._refuse(request, answer)

    def _begin(self, request: SimRequest, placement: Placement) -> None:
        decoder = self.decoders.get(placement.decode.id)
        limit = self._cluster.model.max_context if decoder is None else decoder.token_limit
        attempt = request.live = new_try(request, placement, self._hasher, limit)
        outcome = request.outcome
        outcome.prefill, outcome.decode = placement.prefill.id, placement.decode.id
        outcome.predicted_ttft_s, outcome.predicted_tbt_s = placement.predicted_ttft_ms / 1e3, placement.predicted_tbt_ms / 1e3
        peer = placement.decode.id
        if decoder is None or not decoder.alive or decoder.member.incarnation != placement.decode.incarnation:
            self.failed(attempt, Failure(Reason.PEER_SILENT, f"{peer} is gone", peer))
            return
        try:
            decoder.begin(attempt)
        except Busy as e:
            self.failed(attempt, Failure(Reason.BUSY, e.message, peer))

    # -- what machines tell --------------------------------------------------------------------------------------------

    def begun(self, attempt: Try) -> None:
        request = attempt.request
        if request.outcome.waited_s == 0.0 and request.attempts == 1:
            request.outcome.waited_s = self._clock.now - request.outcome.arrived
        if request.first_at is None and not request.begun:
            request.begun = True
            self.unbegun -= 1

    def first_token(self, attempt: Try) -> None:
        request, now = attempt.request, self._clock.now
        if request.first_at is None:
            request.first_at = now
            request.outcome.ttft_s = now + self._cluster.post_prefill_s - request.outcome.arrived
            request.outcome.cached_tokens = min(attempt.found, request.prompt_tokens)

    def finished(self, attempt: Try) -> None:
        request = attempt.request
        request.outcome.ended = self._clock.now
        self._over(request)
        self.brain.finished(self._told(attempt, "ok", request.wanted))

    def failed(self, attempt: Try, failure: Failure) -> None:
        """The next attempt begins, elsewhere than with ``failure.peer``, or the request has failed."""
        request = attempt.request
        if request.live is not attempt:
            return
        request.live = None
        attempt.over = True
        self._counters["attempts_failed"] += 1
        request.emitted = max(len(attempt.sequence.tokens) - request.prompt_tokens, 0)
        request.outcome.wasted_s += attempt.spent_s
        self.brain.finished(self._told(attempt, failure.reason.value, 0))
        if failure.peer:
            request.exclude = (*request.exclude, failure.peer)
        if request.attempts >= self._cluster.max_attempts:
            request.outcome.failed = failure.reason.value
            self._over(request)
        else:
            self._clock.after(0.0, lambda: self._place(request))

    def refused(self, attempt: Try, refusal: Refusal) -> None:
        """After the prefill: nothing comes of it."""
        request = attempt.request
        request.live = None
        request.outcome.wasted_s += attempt.spent_s
        self.decoders[attempt.placement.decode.id].cancel(attempt)
        self.brain.finished(self._told(attempt, refusal.reason.value, 0))
        self._refuse(request, refusal)

    def _refuse(self, request: SimRequest, refusal: Refusal) -> None:
        outcome = request.outcome
        outcome.refused, outcome.refused_at = refusal.reason.value, self._clock.now
        self._over(request)

    def _late(self, request: SimRequest) -> None:
        """Its budget is used up."""
        self._counters["deadlines_passed"] += 1
        self.waiting.pop(request.id, None)
        self.brain.withdraw(request.id)
        attempt, request.live = request.live, None
        if attempt is not None:
            request.outcome.wasted_s += attempt.spent_s
            decoder = self.decoders.get(attempt.placement.decode.id)
            if decoder is not None:
                decoder.cancel(attempt)
            self.brain.finished(self._told(attempt, Reason.DEADLINE.value, 0))
        request.outcome.failed = Reason.DEADLINE.value
        self._over(request)

    def _over(self, request: SimRequest) -> None:
        request.live = None
        request.over = True
        if request.deadline is not None:
            request.deadline.cancel()
        self.open -= 1
        self.ended += 1
        if not request.begun:
            request.begun = True
            self.unbegun -= 1
        self.on_end()

    def _told(self, attempt: Try, outcome: str, output: int) -> Finished:
        result = attempt.request.outcome
        return Finished(
            attempt.request.id,
            attempt.number,
            attempt.placement.booking,
            ttft_ms=(result.ttft_s or 0.0) * 1e3,
            tbt_ms=(result.tbt_s or 0.0) * 1e3,
            output_tokens=output,
            cached_tokens=attempt.found,
            outcome=outcome,
        )
