"""The gateway's book of one request: ids streamed, attempts minted, peers excluded, budget left. Pure.

An attempt's ids are accepted only as (current attempt, next position). A failed attempt is followed by another while
attempts and time are left; the failed peer's life is excluded, and the ids already streamed go along. The first failure is
followed at once, later ones after growing pauses.

A request under way (an attempt of it failed, or ids of it were streamed) is not given up because nobody can take it at
the moment: it waits ``path_wait_ms`` for a worker to come back or to have room, and no attempt is counted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moonpool.core.blocks import BlockHasher
from moonpool.core.errors import (
    AttemptFailed,
    Busy,
    DeadlinePassed,
    MoonpoolError,
    Moved,
    PeerSilent,
    Refused,
    TransferFailed,
)
from moonpool.core.ids import Incarnation, MemberId
from moonpool.core.placement import PlaceRequest
from moonpool.core.request import Attempt, Emission, FinishReason, Request, Targets

FIRST_PAUSE_S = 0.1  # before the second attempt after a failure in a row, doubling up to LAST_PAUSE_S
LAST_PAUSE_S = 1.0
DISTRUST_S = 1.0  # who failed an attempt and is all there is, is asked again after this: by then membership knows the dead


@dataclass(frozen=True, slots=True)
class _Excluded:
    peer: MemberId
    life: Incarnation | None  # None: unknown, so every life
    soft: bool  # it was only busy


class Ledger:
    """``started`` and every ``now`` are seconds of one monotonic clock; ``life_of`` gives a member's newest life.

    ``hasher`` names the blocks of prompt and output; without one only the prompt's blocks can be found by later attempts.
    """

    def __init__(
        self,
        request: Request,
        *,
        started: float,
        budget_ms: int,
        max_attempts: int,
        life_of: Callable[[MemberId], Incarnation | None],
        hasher: BlockHasher | None = None,
        path_wait_ms: int = 0,
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
        self._hasher = hasher
        self._path_wait_s = path_wait_ms / 1000
        self._keys = request.keys  # of the context's whole blocks, as far as they are known
        self._excluded: list[_Excluded] = []
        self._failures = 0  # attempts that count
        self._begun_upon = False  # by a worker that failed since, or handed it over
        self._in_a_row = 0  # failed tries since an id was streamed
        self._begun = started  # the current attempt
        self._waits_since: float | None = None  # nobody could take it
        self._last: MoonpoolError | None = None

    def next_attempt(self, now: float) -> None:
        """Begin the next attempt; raises what ends the request where there is none left."""
        if now >= self.deadline:
            raise self.out_of_time()
        if self._failures >= self._max_attempts and self._last is not None:
            raise self._last
        self.number += 1
        self._begun = now

    def pause_s(self, draw: float) -> float:
        """How long to wait before the next attempt; ``draw`` in [0, 1) spreads what failed together."""
        if self._in_a_row < 2 and self._waits_since is None:
            return 0.0
        doublings = min(max(self._in_a_row - 2, 0), 16)
        longest = min(FIRST_PAUSE_S * (1 << doublings), LAST_PAUSE_S)
        return longest * (0.5 + 0.5 * draw)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Of the whole blocks of prompt and ids streamed: decode workers leave those of the output in the pool, too."""
        if self._hasher is not None:
            context = self.request.prompt + tuple(self.emitted)
            if len(context) // self._hasher.block_tokens > len(self._keys):
                self._keys = tuple(self._hasher.keys(context, known=self._keys))
        return self._keys

    @property
    def _computes_all(self) -> bool:
        """Its next attempt has no use for KV that exists."""
        return self.request.sampling.prompt_logprobs is not None and not self.emitted

    def out_of_time(self) -> DeadlinePassed:
        after = f" after {self.number} attempt(s); the last failure: {self._last.message}" if self._last else ""
        return DeadlinePassed(
            f"request: not finished within {self._budget_ms} ms (timing.request_budget_ms, or x-deadline-ms){after}; "
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
            keys=() if self._computes_all else self.keys,
            prompt_tokens=len(request.prompt) + len(self.emitted),
            max_tokens=max(1, request.sampling.max_tokens - len(self.emitted)),
            targets=request.targets if self.number == 1 else Targets(),
            tenant=request.tenant,
            exclude=tuple(dict.fromkeys(e.peer for e in self._excluded if self._same_life(e))),
            priority=request.priority,
            turn=request.turn,
            kind=request.kind,
            weight=request.weight,
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
        if emission.prompt_logprobs is not None:
            return True
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
        self._in_a_row, self._waits_since = 0, None
        return True

    @property
    def under_way(self) -> bool:
        """Somebody has begun to answer it: it is not given up for want of a free worker."""
        return bool(self.emitted) or self._begun_upon

    def failed(self, error: MoonpoolError) -> None:
        """The current attempt is over. Raises ``error`` unless another attempt may mend it."""
        if not isinstance(error, AttemptFailed):
            raise error
        self._in_a_row += 1
        if error.peer:
            peer = MemberId(error.peer)
            self._excluded.append(_Excluded(peer, self._life_of(peer), isinstance(error, Busy)))
        if not isinstance(error, Busy):
            self._begun_upon = True
        elif self.under_way and self._path_wait_s:
            self._wait(error)
            return
        if not isinstance(error, Moved):
            self._failures += 1
            self._last = error
            self._waits_since = None  # somebody had taken it: what it waited before was for that one

    def no_path(self, refusal: Refused) -> None:
        """Nobody can take it: forget who was merely busy and let the next attempt try them, or raise.

        What is raised is the failure that led here, where there was one: it is the reason, not the emptiness after it.
        """
        self._in_a_row += 1
        busy = any(e.soft for e in self._excluded)
        if self.under_way and self._path_wait_s:
            self._wait(refusal)
        elif not busy:
            raise self._last or refusal
        distrusted = self._waits_since is None or self._begun - self._waits_since < DISTRUST_S
        self._excluded = [e for e in self._excluded if distrusted and not e.soft]

    def _wait(self, why: MoonpoolError) -> None:
        """Raises once it has waited long enough."""
        if self._waits_since is None:
            self._waits_since = self._begun
        if self._begun - self._waits_since >= self._path_wait_s:
            raise self._last or why
