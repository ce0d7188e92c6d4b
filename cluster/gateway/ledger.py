"""The gateway's book of one request: ids streamed, attempts minted, peers excluded, budget left. Pure.

An attempt's ids are accepted only as (current attempt, next position). A failed attempt is followed by another while
attempts and time are left; the failed peer's life is excluded, and the ids already streamed go along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.errors import AttemptFailed, Busy, DeadlinePassed, MoonpoolError, NoPath, PeerSilent, TransferFailed
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.placement import PlaceRequest
from moonpool.core.request import Attempt, Emission, FinishReason, Request, Targets


@dataclass(frozen=True, slots=True)
class _Excluded:
    peer: MemberId
    life: Incarnation | None  # None: unknown, so every life
    soft: bool  # it was only busy


class Ledger:
    """``started`` and every ``now`` are seconds of one monotonic clock; ``life_of`` gives a member's newest life."""

    def __init__(
        self,
        request: Request,
        *,
        started: float,
        budget_ms: int,
        max_attempts: int,
        life_of: Callable[[MemberId], Incarnation | None],
    ) -> None:
        self.request = request
        self.deadline = started + budget_ms / 1000
        self.emitted: list[int] = []
        self.number = 0  # of the current attempt
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self._budget_ms = budget_ms
        self._max_attempts = max_attempts
        self._life_of = life_of
        self._excluded: list[_Excluded] = []
        self._last: MoonpoolError | None = None

    def next_attempt(self, now: float) -> None:
        """Begin the next attempt; raises what ends the request where there is none left."""
        if now >= self.deadline:
            raise self.out_of_time()
        if self.number >= self._max_attempts and self._last is not None:
            raise self._last
        self.number += 1

    def out_of_time(self) -> DeadlinePassed:
        after = f" after {self.number} attempt(s); the last failure: {self._last.message}" if self._last else ""
        return DeadlinePassed(
            f"request: not finished within {self._budget_ms} ms (timing.request_budget_ms){after}; "
            f"{len(self.emitted)} tokens were generated"
        )

    def left_ms(self, now: float) -> int:
        return max(0, round((self.deadline - now) * 1000))

    def place_request(self) -> PlaceRequest:
        """What to ask the conductor. A request once admitted is not refused for its targets: retries carry none."""
        request = self.request
        return PlaceRequest(
            request=request.id,
            attempt=self.number,
            keys=request.keys,
            prompt_tokens=len(request.prompt) + len(self.emitted),
            max_tokens=max(1, request.sampling.max_tokens - len(self.emitted)),
            targets=request.targets if self.number == 1 else Targets(),
            tenant=request.tenant,
            exclude=tuple(dict.fromkeys(e.peer for e in self._excluded if self._same_life(e))),
            turn=request.turn,
        )

    def _same_life(self, e: _Excluded) -> bool:
        """A peer that came back as a newer process is not the one that failed."""
        return e.life is None or self._life_of(e.peer) in (None, e.life)

    def attempt(self, now: float) -> Attempt:
        return Attempt(self.request, self.number, tuple(self.emitted), self.left_ms(now))

    def accept(self, emission: Emission) -> bool:
        """Take one emission; False: of another attempt or a position already streamed, to be ignored.

        Raises the failure that ends the attempt.
        """
        if emission.attempt != self.number or self.finish is not None:
            return False
        if emission.error is not None:
            raise emission.error.to_exception()
        if emission.sampled is None and emission.finish is None:
            return False
        if emission.position < len(self.emitted):
            return False
        if emission.position > len(self.emitted):
            raise TransferFailed(
                f"tokens: position {emission.position} came after {len(self.emitted) - 1}; an id is missing from the stream"
            )
        if emission.finish is FinishReason.CANCELLED:
            raise PeerSilent("tokens: the decode worker ended the attempt on its own")
        if emission.position == 0:
            self.cached_tokens = min(emission.cached_tokens, max(0, len(self.request.prompt) - 1))
        if emission.sampled is not None:
            self.emitted.append(emission.sampled.token)
        self.finish = emission.finish
        return True

    def failed(self, error: MoonpoolError) -> None:
        """The current attempt is over. Raises ``error`` unless another attempt may mend it."""
        if not isinstance(error, AttemptFailed):
            raise error
        self._last = error
        if error.peer:
            peer = MemberId(error.peer)
            self._excluded.append(_Excluded(peer, self._life_of(peer), isinstance(error, Busy)))

    def no_path(self, refusal: NoPath) -> None:
        """Nobody is left to place on: forget who was merely busy and let the next attempt try them, or raise.

        What is raised is the failure that led here, where there was one: it is the reason, not the emptiness after it.
        """
        if not any(e.soft for e in self._excluded):
            raise self._last or refusal
        self._excluded = [e for e in self._excluded if not e.soft]
