"""One hand-off as its sink sees it: facts in, actions out. Owns the order of things, not the things.

Facts come from three places that know nothing of one another: the prefill worker's stream (``begun``, ``first_token``,
``drained``, ``failed``), the store node's session (``landed``, which may overtake ``begun``) and the copy thread
(``copied``). Any order and any repetition of them gives the same end. All are told on one thread.

The request may join the batch when its first token is known and every layer of every block of the landing has been
copied into pages and verified there. Pages are released exactly once, and never while a copy into them is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from moonpool.core.errors import Bug, Failure
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.landing import Landed, Landing, LandingSlot


class State(StrEnum):
    WAITING = "waiting"  # pages taken, job sent; nothing begun
    LANDING = "landing"  # slots known: slices land and are copied
    JOINED = "joined"  # in the batch: the pages are the batch's, the rest of the hand-off is of no interest
    CLOSING = "closing"  # over without joining: copies under way end, then the pages go
    ENDED = "ended"


class Fact(StrEnum):
    BEGUN = "begun"
    LANDED = "landed"
    FIRST = "first_token"
    COPIED = "copied"
    DRAINED = "drained"
    FAILED = "failed"  # prefill failed, transfer failed, peer silent, deadline passed, digest mismatch
    CANCELLED = "cancelled"
    BATCHED = "batched"  # internal: everything is in


LEGAL: dict[State, frozenset[Fact]] = {
    State.WAITING: frozenset({Fact.BEGUN, Fact.LANDED, Fact.FIRST, Fact.DRAINED, Fact.FAILED, Fact.CANCELLED}),
    State.LANDING: frozenset(set(Fact) - {Fact.BEGUN}),
    State.JOINED: frozenset({Fact.LANDED, Fact.DRAINED, Fact.FAILED, Fact.CANCELLED}),
    State.CLOSING: frozenset(set(Fact) - {Fact.BATCHED}),
    State.ENDED: frozenset({Fact.BEGUN, Fact.LANDED, Fact.FIRST, Fact.DRAINED, Fact.FAILED, Fact.CANCELLED}),
}


@dataclass(frozen=True, slots=True)
class EmitFirst:
    """Stream the first token; ``ends`` when it ends the request and nothing joins."""

    first: FirstToken
    ends: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy layer ``layer`` of ``slots`` into the attempt's pages and verify the copies."""

    layer: int
    slots: tuple[LandingSlot, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """Every block is in its page: the request enters the running batch with its pages."""


@dataclass(frozen=True, slots=True)
class EndLanding:
    """The reader needs the slots no longer."""

    landing: int


@dataclass(frozen=True, slots=True)
class StopCopies:
    """Copies not yet begun are of no use; each copy asked for is still reported, done or not."""


@dataclass(frozen=True, slots=True)
class CancelPrefill:
    pass


@dataclass(frozen=True, slots=True)
class Fail:
    failure: Failure


@dataclass(frozen=True, slots=True)
class ReleasePages:
    pass


Action = EmitFirst | Copy | Join | EndLanding | StopCopies | CancelPrefill | Fail | ReleasePages
Slice = tuple[int, int]  # (layer, block)


class HandoffSink:
    """The state machine of one (request, attempt). ``layers`` of the model; ``blocks`` the prompt blocks not in pages yet."""

    def __init__(self, request: str, attempt: int, layers: int, blocks: Iterable[int]) -> None:
        self.state = State.WAITING
        self.landing: Landing | None = None
        self._identity = (request, attempt)
        self._layers = layers
        self._expected = frozenset(blocks)
        self._slots: dict[int, LandingSlot] = {}
        self._early: list[Landed] = []  # overtook ``begun``
        self._asked: set[Slice] = set()
        self._copied: set[Slice] = set()
        self._first: FirstToken | None = None
        self._ends = False  # the first token ended the request
        self._landing_ended = False
        self._drained: Drained | None = None
        self._story: list[str] = []

    @property
    def copying(self) -> int:
        """Copies asked for and not reported yet."""
        return len(self._asked) - len(self._copied)

    @property
    def all_landed(self) -> bool:
        """Every slice of the landing is in the pool, as far as was told."""
        return self.landing is not None and len(self._asked) == len(self._slots) * self._layers

    def begun(self, landing: Landing) -> list[Action]:
        """Prefill has begun and its blocks will come in ``landing``; blocks the host holds already can be copied at once."""
        if self.landing is not None:
            return self._repeated(Fact.BEGUN, same=landing == self.landing)
        self._tell(Fact.BEGUN, f"landing {landing.id}")
        self._check_landing(landing)
        self.landing = landing
        if self.state is not State.WAITING:  # over before it began
            return self._end_landing()
        self.state = State.LANDING
        self._slots = {slot.block: slot for slot in (*landing.held, *landing.slots)}
        held = tuple(slot.block for slot in landing.held)
        actions: list[Action] = []
        for layer in range(self._layers):
            actions += self._copy(layer, held)
        early, self._early = self._early, []
        for landed in early:
            actions += self._take(landed)
        return actions + self._join_when_complete()

    def landed(self, landed: Landed) -> list[Action]:
        """The store node verified slices of one layer."""
        if (landed.request, landed.attempt) != self._identity:
            raise self._bug(f"landed for {landed.request} attempt {landed.attempt}")
        self._tell(Fact.LANDED, f"landing {landed.landing} layer {landed.layer} blocks {list(landed.blocks)}")
        if self.state is State.WAITING:
            self._early.append(landed)
            return []
        return self._take(landed) if self.state is State.LANDING else []

    def first_token(self, first: FirstToken, *, ends: bool) -> list[Action]:
        """The id at the attempt's first position; ``ends`` when it ends the request."""
        if self._first is not None:
            return self._repeated(Fact.FIRST, same=first == self._first)
        self._tell(Fact.FIRST, f"token {first.words}{' ends' if ends else ''}")
        self._first = first
        if self.state in (State.CLOSING, State.ENDED):
            return []
        emit = EmitFirst(first, ends)
        if ends:
            self._ends = True
            return [emit, *self._close()]
        return [emit, *self._join_when_complete()]

    def copied(self, layer: int, blocks: Iterable[int]) -> list[Action]:
        """The copy thread is done with these slices: they are verified in pages, or were skipped after ``StopCopies``."""
        slices = {(layer, block) for block in blocks}
        if not slices <= self._asked:
            raise self._bug(f"copied {sorted(slices - self._asked)}, never asked for")
        if slices <= self._copied:
            return []
        self._tell(Fact.COPIED, f"layer {layer} blocks {sorted(b for _, b in slices)}")
        self._copied |= slices
        if self.state is State.CLOSING:
            return self._end_when_quiet()
        return self._join_when_complete()

    def drained(self, drained: Drained) -> list[Action]:
        """The writer is through: every slice it could bring is in the pool."""
        if self._drained is not None:
            return self._repeated(Fact.DRAINED, same=drained == self._drained)
        self._tell(Fact.DRAINED, f"{drained.bytes_sent} bytes by {drained.carrier}")
        self._drained = drained
        return self._end_landing() if self.state is State.ENDED else []

    def failed(self, failure: Failure) -> list[Action]:
        """Prefill, transfer, copy, peer or deadline: over, unless the request has joined already."""
        self._tell(Fact.FAILED, f"{failure.reason}: {failure.message}")
        if self.state in (State.JOINED, State.CLOSING, State.ENDED):
            return self._give_up_cache()
        return [Fail(failure), CancelPrefill(), *self._close()]

    def cancelled(self) -> list[Action]:
        """Nobody wants the answer any more. After joining, the batch owns the pages and ends the request itself."""
        self._tell(Fact.CANCELLED, "")
        if self.state in (State.JOINED, State.CLOSING, State.ENDED):
            return self._give_up_cache()
        return [CancelPrefill(), *self._close()]

    def _check_landing(self, landing: Landing) -> None:
        if (landing.request, landing.attempt) != self._identity:
            raise self._bug(f"landing {landing.id} is for {landing.request} attempt {landing.attempt}")
        offered = [slot.block for slot in (*landing.held, *landing.slots)]
        if len(offered) != len(set(offered)) or set(offered) != self._expected:
            raise self._bug(f"landing {landing.id} brings blocks {sorted(offered)}, missing are {sorted(self._expected)}")

    def _take(self, landed: Landed) -> list[Action]:
        assert self.landing is not None
        if landed.landing != self.landing.id:
            raise self._bug(f"landed in {landed.landing}, the landing is {self.landing.id}")
        strange = [block for block in landed.blocks if block not in self._slots]
        if strange or not 0 <= landed.layer < self._layers:
            raise self._bug(f"landed layer {landed.layer} of blocks {list(landed.blocks)}, not part of the landing")
        return self._copy(landed.layer, landed.blocks)

    def _copy(self, layer: int, blocks: Iterable[int]) -> list[Action]:
        fresh = [block for block in blocks if (layer, block) not in self._asked]
        self._asked.update((layer, block) for block in fresh)
        return [Copy(layer, tuple(self._slots[block] for block in fresh))] if fresh else []

    def _join_when_complete(self) -> list[Action]:
        if self.state is not State.LANDING or self._first is None or len(self._copied) < len(self._slots) * self._layers:
            return []
        self._tell(Fact.BATCHED, "")
        self.state = State.JOINED
        return [*self._end_landing(), Join()]

    def _close(self) -> list[Action]:
        self.state = State.CLOSING
        return [StopCopies()] if self.copying else self._end_when_quiet()

    def _end_when_quiet(self) -> list[Action]:
        if self.copying:
            return []
        self.state = State.ENDED
        # After the last copy: a slot that another landing writes while it is read here would look like a bad copy.
        return [*self._end_landing(), ReleasePages()]

    def _end_landing(self) -> list[Action]:
        """Once. A prompt whose first token was its whole answer still becomes cache: its landing stays until it drained."""
        if self.landing is None or self._landing_ended or (self._ends and self._drained is None):
            return []
        self._landing_ended = True
        return [EndLanding(self.landing.id)]

    def _give_up_cache(self) -> list[Action]:
        """Late bad news: the landing of an ended request will not drain."""
        self._ends = False
        return self._end_landing() if self.state is State.ENDED else []

    def _tell(self, fact: Fact, detail: str) -> None:
        self._story.append(f"{self.state} <- {fact} {detail}".rstrip())
        if fact not in LEGAL[self.state]:
            raise self._bug(f"{fact} has no place in state {self.state}")

    def _repeated(self, fact: Fact, *, same: bool) -> list[Action]:
        if not same:
            raise self._bug(f"{fact} was told before with another value")
        return []

    def _bug(self, what: str) -> Bug:
        name = f"{self._identity[0]} attempt {self._identity[1]}"
        return Bug(f"hand-off sink of {name}: {what}; story: {'; '.join(self._story) or 'nothing yet'}")
