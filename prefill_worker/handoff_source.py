"""One hand-off as its source sees it: facts in, actions out. Owns the order of things, not the things.

The caller performs the actions in the order given, before it tells the next fact. Facts may come from the compute
thread (``layer``) and from the event loop (all others): the caller holds one lock around a fact and its actions.

A fact told twice is a no-op; a fact that contradicts an earlier one, or has no place in the present state, raises
``Bug`` with the story of the request. Pages are released exactly once, when nobody computes on them *and* no push
may still read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moonpool.core.errors import Bug, Failure
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.landing import Landing


class State(StrEnum):
    QUEUED = "queued"  # no landing; maybe pages
    SENDING = "sending"  # layers are computed and pushed
    FINISHING = "finishing"  # the first token is out, posted pushes end
    ABANDONING = "abandoning"  # failed or cancelled: nothing more is posted, posted pushes end
    ENDED = "ended"


class Fact(StrEnum):
    GRANTED = "granted"
    LAYER = "layer"
    SAMPLED = "sampled"
    STOPPED = "stopped"  # compute and prefix load have left the pages
    DRAINED = "drained"
    FAILED = "failed"  # transfer failed, deadline passed, a peer is silent, the engine raised
    CANCELLED = "cancelled"


# (state, fact) -> next state. DRAINED and STOPPED lead to ENDED only when both have been told.
TRANSITIONS: dict[tuple[State, Fact], State] = {
    (State.QUEUED, Fact.GRANTED): State.SENDING,
    (State.QUEUED, Fact.FAILED): State.ENDED,
    (State.QUEUED, Fact.CANCELLED): State.ENDED,
    (State.SENDING, Fact.LAYER): State.SENDING,
    (State.SENDING, Fact.SAMPLED): State.FINISHING,
    (State.SENDING, Fact.FAILED): State.ABANDONING,
    (State.SENDING, Fact.CANCELLED): State.ABANDONING,
    (State.FINISHING, Fact.FAILED): State.ABANDONING,
    (State.FINISHING, Fact.CANCELLED): State.ABANDONING,
    (State.FINISHING, Fact.DRAINED): State.ENDED,
    (State.ABANDONING, Fact.LAYER): State.ABANDONING,  # the layer under way when the end came
    (State.ABANDONING, Fact.SAMPLED): State.ABANDONING,
    (State.ABANDONING, Fact.FAILED): State.ABANDONING,  # the first reason stays
    (State.ABANDONING, Fact.CANCELLED): State.ABANDONING,
    (State.ABANDONING, Fact.DRAINED): State.ABANDONING,
    (State.ABANDONING, Fact.STOPPED): State.ABANDONING,
    # Late facts of an attempt that is over change nothing; a landing granted too late is given up.
    (State.ENDED, Fact.GRANTED): State.ENDED,
    (State.ENDED, Fact.DRAINED): State.ENDED,
    (State.ENDED, Fact.FAILED): State.ENDED,
    (State.ENDED, Fact.CANCELLED): State.ENDED,
    (State.ENDED, Fact.STOPPED): State.ENDED,
    (State.ENDED, Fact.LAYER): State.ENDED,
}


@dataclass(frozen=True, slots=True)
class Block:
    """Prompt block ``index`` in device page ``page``; ``valid`` tokens of it are meaningful."""

    index: int
    page: int
    valid: int


@dataclass(frozen=True, slots=True)
class EmitBegun:
    landing: Landing


@dataclass(frozen=True, slots=True)
class Push:
    chunk: int
    layer: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class EmitFirst:
    first: FirstToken


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait for local completions, push what is missing once more, tell the store node."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Post nothing more, poll what is posted to its end, tell the store node."""


@dataclass(frozen=True, slots=True)
class EmitDrained:
    drained: Drained


@dataclass(frozen=True, slots=True)
class EmitFailure:
    failure: Failure


@dataclass(frozen=True, slots=True)
class ReleasePages:
    pass


Action = EmitBegun | Push | EmitFirst | Drain | Abandon | EmitDrained | EmitFailure | ReleasePages


class HandoffSource:
    """The state machine of one (request, attempt)."""

    def __init__(self, request: str, attempt: int, layers: int) -> None:
        self.state = State.QUEUED
        self.landing: Landing | None = None
        self._name = f"{request} attempt {attempt}"
        self._identity = (request, attempt)
        self._layers = layers
        self._wanted: frozenset[int] = frozenset()
        self._pushed: set[tuple[int, int]] = set()  # (layer, block)
        self._first: FirstToken | None = None
        self._stopped = False
        self._drained: Drained | None = None
        self._story: list[str] = []

    @property
    def stop(self) -> bool:
        """Whether compute shall stop at the next layer border."""
        return self.state in (State.ABANDONING, State.ENDED)

    def granted(self, landing: Landing) -> list[Action]:
        """The decode host's store node granted ``landing``."""
        if self.landing is not None:
            return self._repeated(Fact.GRANTED, same=landing == self.landing)
        if (landing.request, landing.attempt) != self._identity:
            raise self._bug(f"landing {landing.id} belongs to {landing.request} attempt {landing.attempt}")
        self._move(Fact.GRANTED, f"landing {landing.id}")
        self.landing = landing
        if self.state is State.ENDED:
            return [Abandon()]
        self._wanted = frozenset(slot.block for slot in landing.slots)
        return [EmitBegun(landing)]

    def layer(self, chunk: int, layer: int, blocks: Sequence[Block]) -> list[Action]:
        """K and V of ``layer`` are in the pages of ``blocks``: computed, or loaded from a reused prefix.

        Each (layer, block) is pushed once, whoever says it first: a slot that the reader may be copying is never
        written a second time.
        """
        if not 0 <= layer < self._layers:
            raise self._bug(f"layer {layer} of {self._layers}")
        self._move(Fact.LAYER, f"chunk {chunk} layer {layer} blocks {[b.index for b in blocks]}")
        if self.stop:
            return []
        fresh = tuple(b for b in blocks if b.index in self._wanted and (layer, b.index) not in self._pushed)
        self._pushed.update((layer, b.index) for b in fresh)
        return [Push(chunk, layer, fresh)] if fresh else []

    def sampled(self, first: FirstToken) -> list[Action]:
        """The prompt is computed and its first id drawn; compute has left the pages."""
        if self._first is not None:
            return self._repeated(Fact.SAMPLED, same=first == self._first)
        missing = len(self._wanted) * self._layers - len(self._pushed)
        if missing and self.state is State.SENDING:
            raise self._bug(f"sampled while {missing} slices of the landing were never pushed")
        self._move(Fact.SAMPLED, f"token {first.words}")
        self._first = first
        self._stopped = True
        if self.state is State.ABANDONING:
            return self._end_when_quiet()
        return [EmitFirst(first), Drain()]

    def stopped(self) -> list[Action]:
        """Compute and prefix load have left the pages without a first token."""
        if self._stopped:
            return []
        self._move(Fact.STOPPED, "")
        self._stopped = True
        return self._end_when_quiet()

    def drained(self, drained: Drained) -> list[Action]:
        """The writer's local completions are in and the store node knows. Draining twice is one drain: the first counts."""
        if self.landing is None or drained.landing != self.landing.id:
            raise self._bug(f"drained landing {drained.landing}")
        if self._drained is not None:
            return []
        before = self.state
        self._move(Fact.DRAINED, f"{drained.bytes_sent} bytes by {drained.carrier}")
        self._drained = drained
        if before is State.FINISHING:
            return [EmitDrained(drained), ReleasePages()]
        return self._end_when_quiet()

    def failed(self, failure: Failure) -> list[Action]:
        """The attempt cannot go on (deadline, transfer, silent peer, engine); the first reason is the one told."""
        return self._give_up(Fact.FAILED, failure)

    def cancelled(self, failure: Failure) -> list[Action]:
        """Nobody wants the answer any more."""
        return self._give_up(Fact.CANCELLED, failure)

    def _give_up(self, fact: Fact, failure: Failure) -> list[Action]:
        before = self.state
        self._move(fact, failure.message)
        if before in (State.ABANDONING, State.ENDED):
            return []
        # At once: the reader goes on to its next attempt while this one is cleaned up.
        return [EmitFailure(failure), ReleasePages() if before is State.QUEUED else Abandon()]

    def _end_when_quiet(self) -> list[Action]:
        if self.state is not State.ABANDONING or not self._stopped or self._drained is None:
            return []
        self.state = State.ENDED
        return [ReleasePages()]

    def _move(self, fact: Fact, detail: str) -> None:
        self._story.append(f"{self.state} <- {fact} {detail}".rstrip())
        after = TRANSITIONS.get((self.state, fact))
        if after is None:
            raise self._bug(f"{fact} has no place in state {self.state}")
        self.state = after

    def _repeated(self, fact: Fact, *, same: bool) -> list[Action]:
        if not same:
            raise self._bug(f"{fact} was told before with another value")
        return []

    def _bug(self, what: str) -> Bug:
        return Bug(f"hand-off source of {self._name}: {what}; story: {'; '.join(self._story) or 'nothing yet'}")
