"""The source of a hand-off under any order and repetition of what it is told."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import Bug, Failure, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import Landing, LandingSlot, SlotRef
from moonpool.core.membership import PrefillTiming
from moonpool.core.request import Sampled
from moonpool.prefill_worker.handoff_source import (
    TRANSITIONS,
    Abandon,
    Action,
    Block,
    Drain,
    EmitBegun,
    EmitDrained,
    EmitFailure,
    EmitFirst,
    Fact,
    HandoffSource,
    Push,
    ReleasePages,
    State,
)

R = RequestId("r")
FIRST = FirstToken(Sampled(42), 0, False, PrefillTiming(1, 0, 0.0))
GONE = Failure(Reason.CANCELLED, "gone")


def landing(blocks: int, attempt: int = 1) -> Landing:
    slots = tuple(LandingSlot(block, SlotRef(0, block, bytes(16)), 16) for block in range(blocks))
    return Landing(7, R, attempt, NodeId("b"), Incarnation(1), 1, MemberId("p"), slots)


class Play:
    """A worker that computes layers one after the other, and a drain that ends when it is told to."""

    def __init__(self, layers: int, blocks: int) -> None:
        self.source = HandoffSource("r", 1, layers)
        self.landing = landing(blocks)
        self.layers = [(layer, block) for block in range(blocks) for layer in range(layers)]
        self.computing = True
        self.draining = False
        self.drained = False
        self.seen: Counter[str] = Counter()
        self.pushed: Counter[tuple[int, int]] = Counter()

    def step(self, what: str) -> None:
        source = self.source
        if what == "grant" and source.state in (State.QUEUED, State.ENDED) and source.landing is None:
            self._took(source.granted(self.landing))
        elif what == "layer" and self.computing and source.landing is not None and source.state is not State.ENDED:
            if source.stop:
                self.computing = False
                self._took(source.stopped())
            elif self.layers:
                layer, block = self.layers.pop(0)
                self._took(source.layer(0, layer, [Block(block, block, 16)]))
            else:
                self.computing = False
                self._took(source.sampled(FIRST))
        elif what == "drained" and self.draining and not self.drained:
            self.drained = True
            self._took(source.drained(Drained(7, 1, "memory")))
        elif what == "cancel":
            self._took(source.cancelled(GONE))
        elif what == "fail":
            self._took(source.failed(GONE))

    def _took(self, actions: list[Action]) -> None:
        for action in actions:
            self.seen[type(action).__name__] += 1
            if isinstance(action, Push):
                assert self.seen["Drain"] == self.seen["Abandon"] == 0, "a push after the end of pushing"
                self.pushed.update((action.layer, block.index) for block in action.blocks)
            if isinstance(action, Drain | Abandon):
                self.draining = True
            if isinstance(action, ReleasePages) and self.seen["EmitBegun"]:
                assert self.drained, "pages went while pushes may read them"
                assert not self.computing, "pages went while somebody computes on them"
        for once in (EmitBegun, EmitFirst, Drain, Abandon, EmitDrained, EmitFailure, ReleasePages):
            assert self.seen[once.__name__] <= 1
        assert self.seen["EmitDrained"] + self.seen["EmitFailure"] <= 1

    def finish(self) -> None:
        for _ in range(len(self.layers) + 4):
            for what in ("grant", "layer", "drained"):
                self.step(what)


@given(
    layers=st.integers(1, 3),
    blocks=st.integers(0, 3),
    steps=st.lists(st.sampled_from(["grant", "layer", "layer", "layer", "drained", "cancel", "fail"]), max_size=25),
)
def test_whatever_happens_pages_come_back_once_and_the_last_event_is_said(layers: int, blocks: int, steps: list[str]) -> None:
    play = Play(layers, blocks)
    for what in steps:
        play.step(what)
    play.finish()
    assert play.source.state is State.ENDED
    assert play.seen["ReleasePages"] == 1
    assert play.seen["EmitDrained"] + play.seen["EmitFailure"] == 1
    assert all(count == 1 for count in play.pushed.values()), "a slice is pushed once"
    if play.seen["EmitDrained"]:
        assert len(play.pushed) == layers * blocks


def test_every_state_has_a_way_to_the_end() -> None:
    reached = {State.ENDED}
    for _ in State:
        reached |= {before for (before, _), after in TRANSITIONS.items() if after in reached}
    assert reached | {State.ABANDONING} == set(State), "abandoning ends when drained and stopped were both told"


@pytest.mark.parametrize("state", [s for s in State if s not in (State.ENDED,)])
def test_a_cancel_is_legal_in_every_state(state: State) -> None:
    assert (state, Fact.CANCELLED) in TRANSITIONS
    assert (state, Fact.FAILED) in TRANSITIONS


def test_a_landing_of_another_attempt_is_an_error_with_the_story() -> None:
    source = HandoffSource("r", 1, 1)
    with pytest.raises(Bug, match="landing 7 belongs to r attempt 2; story: nothing yet"):
        source.granted(landing(1, attempt=2))
