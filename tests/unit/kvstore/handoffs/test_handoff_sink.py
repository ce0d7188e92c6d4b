"""The sink of a hand-off under any order and repetition of what it is told."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import Bug, Failure, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import Landed, Landing, LandingSlot, SlotRef
from moonpool.core.membership import PrefillTiming
from moonpool.core.request import Sampled
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
    State,
)

R = RequestId("r")


def slot(block: int) -> LandingSlot:
    return LandingSlot(block, SlotRef(0, block, bytes(16)), 16)


def landing(written: range, held: range) -> Landing:
    slots, there = tuple(map(slot, written)), tuple(map(slot, held))
    return Landing(7, R, 1, NodeId("b"), Incarnation(1), 1, MemberId("p"), slots, there)


FIRST = FirstToken(Sampled(42), 0, False, PrefillTiming(1, 0, 0.0))


class Play:
    """Tells facts by name and keeps what must hold at every moment."""

    def __init__(self, layers: int, held: int, blocks: int, *, ends: bool) -> None:
        self.sink = HandoffSink(R, 1, layers, range(blocks))
        self.landing = landing(range(held, blocks), range(held))
        self.ends = ends
        self.open_copies: list[Copy] = []
        self.seen: Counter[str] = Counter()
        self.copied: set[tuple[int, int]] = set()

    def tell(self, fact: tuple[str, int, int]) -> None:
        name, layer, block = fact
        if name == "begun":
            self._took(self.sink.begun(self.landing))
        elif name == "landed":
            self._took(self.sink.landed(Landed(7, R, 1, 0, layer, (block,))))
        elif name == "first":
            self._took(self.sink.first_token(FIRST, ends=self.ends))
        elif name == "drained":
            self._took(self.sink.drained(Drained(7, 1, "memory")))
        elif name == "failed":
            self._took(self.sink.failed(Failure(Reason.PEER_SILENT, "gone")))
        elif name == "cancelled":
            self._took(self.sink.cancelled())
        elif name == "copied" and self.open_copies:
            copy = self.open_copies.pop(block % len(self.open_copies))
            self._took(self.sink.copied(copy.layer, [s.block for s in copy.slots]))

    def _took(self, actions: list[Action]) -> None:
        for action in actions:
            self.seen[type(action).__name__] += 1
            if isinstance(action, Copy):
                for one in action.slots:
                    assert (action.layer, one.block) not in self.copied, "a slice is copied once"
                    self.copied.add((action.layer, one.block))
                self.open_copies.append(action)
            if isinstance(action, ReleasePages):
                assert not self.open_copies, "pages went while a copy was under way"
            if isinstance(action, Join):
                assert not self.open_copies and self.seen["EmitFirst"] == 1
        for once in (EmitFirst, Join, EndLanding, Fail, CancelPrefill, ReleasePages):
            assert self.seen[once.__name__] <= 1
        assert self.seen["Join"] + self.seen["ReleasePages"] <= 1

    def finish_copies(self) -> None:
        while self.open_copies:
            self.tell(("copied", 0, 0))


@st.composite
def plays(draw: st.DrawFn, *, ends: bool = False) -> tuple[Play, list[tuple[str, int, int]]]:
    layers, held, written = draw(st.integers(1, 3)), draw(st.integers(0, 2)), draw(st.integers(0, 3))
    facts = [("begun", 0, 0), ("first", 0, 0), ("drained", 0, 0)]
    facts += [("landed", layer, block) for layer in range(layers) for block in range(held, held + written)]
    facts += draw(st.lists(st.sampled_from(facts), max_size=6))
    facts += [("copied", 0, draw(st.integers(0, 9))) for _ in range(draw(st.integers(0, 8)))]
    return Play(layers, held, held + written, ends=ends), draw(st.permutations(facts))


@given(plays())
def test_any_order_and_repetition_of_good_news_ends_in_one_join(played: tuple[Play, list[tuple[str, int, int]]]) -> None:
    play, facts = played
    for fact in facts:
        play.tell(fact)
    play.finish_copies()
    assert play.sink.state is State.JOINED
    assert play.seen["EmitFirst"] == play.seen["EndLanding"] == play.seen["Join"] == 1
    assert play.seen["Fail"] == play.seen["ReleasePages"] == 0


@given(plays(ends=True))
def test_a_first_token_that_ends_the_request_joins_nothing(played: tuple[Play, list[tuple[str, int, int]]]) -> None:
    play, facts = played
    for fact in facts:
        play.tell(fact)
    play.finish_copies()
    assert play.sink.state is State.ENDED
    assert play.seen["EmitFirst"] == play.seen["EndLanding"] == play.seen["ReleasePages"] == 1
    assert play.seen["Join"] == play.seen["Fail"] == play.seen["CancelPrefill"] == 0


@given(plays(), st.sampled_from(["failed", "cancelled"]), st.integers(0, 20))
def test_bad_news_at_any_moment_leaves_nothing_behind(
    played: tuple[Play, list[tuple[str, int, int]]], bad: str, moment: int
) -> None:
    play, facts = played
    facts.insert(moment % (len(facts) + 1), (bad, 0, 0))
    facts.append((bad, 0, 0))
    for fact in facts:
        play.tell(fact)
    play.finish_copies()
    joined = play.sink.state is State.JOINED
    assert joined or play.sink.state is State.ENDED
    assert play.seen["Join" if joined else "ReleasePages"] == 1
    assert play.seen["EndLanding"] == 1
    if not joined:
        assert play.seen["CancelPrefill"] == 1
        assert play.seen["Fail"] == (bad == "failed")


def test_a_landing_of_another_attempt_is_an_error_with_the_story() -> None:
    sink = HandoffSink("r", 2, 1, range(1))
    sink.first_token(FIRST, ends=False)
    with pytest.raises(Bug, match=r"is for r attempt 1; story: waiting <- first_token token 42; waiting <- begun"):
        sink.begun(landing(range(1), range(0)))
