from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.roster import Fenced, Roster, require_agreement
from moonpool.core.errors import LayoutMismatch
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import PROTOCOL, Liveness, Member, MemberChange

LAYOUT = KVLayout("m", layers=2, kv_heads=1, head_dim=8, dtype="float32")


def member(name: str = "prefill-0", incarnation: int = 1, **changes: object) -> Member:
    made = Member(MemberId(name), Role.PREFILL, NodeId("a"), Incarnation(incarnation), f"host:{incarnation}", pid=1)
    return replace(made, **changes)  # type: ignore[arg-type]


def told(changes: list[MemberChange]) -> list[tuple[int, str]]:
    return [(c.member.incarnation, c.liveness.value) for c in changes]


def test_a_member_without_beats_falls_silent_and_only_proof_makes_it_gone() -> None:
    roster = Roster(1.0)
    assert told(roster.join(member(), 0.0)) == [(1, "live")]
    assert told([c for t in (0.2, 0.4, 0.6, 0.8, 1.0) for c in roster.sweep(t)]) == []
    assert told(roster.sweep(1.1)) == [(1, "silent")]
    assert told([c for t in range(2, 100) for c in roster.sweep(t)]) == []
    assert told(roster.gone(MemberId("prefill-0"), Incarnation(1), "pidfd")) == [(1, "gone")]


def test_a_broken_session_is_silent_at_once() -> None:
    roster = Roster(1.0)
    roster.join(member(), 0.0)
    assert told(roster.broken(MemberId("prefill-0"), Incarnation(1), 0.1)) == [(1, "silent")]
    assert told(roster.broken(MemberId("prefill-0"), Incarnation(1), 0.1)) == []


def test_a_silent_life_that_speaks_again_is_fenced() -> None:
    roster = Roster(1.0)
    roster.join(member(), 0.0)
    roster.broken(MemberId("prefill-0"), Incarnation(1), 0.1)
    with pytest.raises(Fenced, match="silent"):
        roster.beat(MemberId("prefill-0"), Incarnation(1), 0.1)
    with pytest.raises(Fenced, match="silent"):
        roster.join(member(), 0.1)


def test_a_newer_life_replaces_and_fences_the_older_one() -> None:
    roster = Roster(1.0)
    roster.join(member(), 0.0)
    assert told(roster.join(member(incarnation=2), 0.1)) == [(1, "gone"), (2, "live")]
    with pytest.raises(Fenced):
        roster.beat(MemberId("prefill-0"), Incarnation(1), 0.2)
    with pytest.raises(Fenced, match="newer"):
        roster.join(member(), 0.2)
    assert roster.gone(MemberId("prefill-0"), Incarnation(1), "late proof about the old life") == []


def test_time_in_which_the_registry_itself_slept_counts_against_nobody() -> None:
    roster = Roster(1.0)
    roster.join(member(), 0.0)
    roster.sweep(0.1)
    assert roster.sweep(30.0) == []
    assert [c for t in (30.2, 30.4, 30.6) for c in roster.sweep(t)] == []
    assert told(roster.sweep(30.8)) == [(1, "silent")]


@pytest.mark.parametrize(
    ("mine", "theirs", "named"),
    [
        ({"layout": LAYOUT}, {"layout": replace(LAYOUT, block_tokens=32)}, "block_tokens 32 here, 64 at prefill-0"),
        ({"hash_key_id": "k1"}, {"hash_key_id": "k2"}, "hash_key_id differs: 'k2' at decode-0, 'k1' at prefill-0"),
        ({"model": "a"}, {"model": "b"}, "model differs: 'b' at decode-0, 'a' at prefill-0"),
    ],
)
def test_members_that_disagree_are_refused_naming_both_values(
    mine: dict[str, object], theirs: dict[str, object], named: str
) -> None:
    roster = Roster(1.0)
    roster.join(member(**mine), 0.0)
    with pytest.raises(LayoutMismatch, match=named):
        roster.join(member("decode-0", **theirs), 0.0)
    roster.gone(MemberId("prefill-0"), Incarnation(1), "pidfd")
    roster.join(member("decode-0", **theirs), 0.0)


@given(st.lists(st.tuples(st.sampled_from(["join", "beat", "broken", "gone", "sweep"]), st.integers(1, 3)), max_size=40))
def test_a_life_never_goes_back_and_the_newest_one_is_known(steps: list[tuple[str, int]]) -> None:
    roster, order = Roster(1.0), list(Liveness)
    seen: dict[int, Liveness] = {}
    newest = 0
    for now, (step, life) in enumerate(steps):
        name, incarnation = MemberId("prefill-0"), Incarnation(life)
        changes: list[MemberChange] = []
        try:
            if step == "join":
                changes = roster.join(member(incarnation=life), now * 0.4)
                newest = max(newest, life)
            elif step == "beat":
                roster.beat(name, incarnation, now * 0.4)
            elif step == "broken":
                changes = roster.broken(name, incarnation, now * 0.4)
            elif step == "gone":
                changes = roster.gone(name, incarnation, "proof")
            else:
                changes = roster.sweep(now * 0.4)
        except Fenced:
            pass
        for change in changes:
            before = seen.get(change.member.incarnation, Liveness.LIVE)
            assert order.index(change.liveness) >= order.index(before)
            seen[change.member.incarnation] = change.liveness
    assert [c.member.incarnation for c in roster.snapshot()] == ([newest] if newest else [])


def test_a_member_of_another_protocol_is_refused_with_both_named_and_what_to_do() -> None:
    roster = Roster(1.0)
    roster.join(member("store-a", version="2.0.0"), 0.0)
    with pytest.raises(LayoutMismatch, match=rf"protocol differs: 7 at prefill-0 \(moonpool 3.1.0\), {PROTOCOL} at .*; run "):
        roster.join(member(protocol=7, version="3.1.0"), 0.0)
    with pytest.raises(LayoutMismatch, match=f"protocol differs: {PROTOCOL} at prefill-0, 7 at store-b"):
        require_agreement(member(), [MemberChange(member("store-b", protocol=7), Liveness.LIVE)])
    with pytest.raises(LayoutMismatch, match="protocol differs: 0 at prefill-0"):
        roster.join(member(protocol=0), 0.0)  # of before protocols were told


def test_members_of_one_protocol_may_be_exchanged_one_by_one_for_those_of_another_version() -> None:
    roster = Roster(1.0)
    for name in ("prefill-0", "prefill-1"):
        roster.join(member(name, version="2.0.0"), 0.0)
    for name in ("prefill-0", "prefill-1"):
        assert told(roster.join(member(name, 2, version="2.1.0"), 0.1)) == [(1, "gone"), (2, "live")]


def test_a_registry_that_was_frozen_holds_no_session_against_anybody_that_broke_meanwhile() -> None:
    roster = Roster(1.0)
    for name in ("prefill-0", "prefill-1"):
        roster.join(member(name), 0.0)
    roster.sweep(0.5)
    assert roster.broken(MemberId("prefill-0"), Incarnation(1), 20.0) == [], "before its first sweep again"
    assert roster.sweep(20.1) == []
    assert roster.broken(MemberId("prefill-1"), Incarnation(1), 20.2) == [], "and after it"
    assert told(roster.join(member(), 20.5)) == [(1, "live")], "the same life comes back"
    assert told([c for t in (20.3, 20.5, 20.7, 20.9, 21.1, 21.3) for c in roster.sweep(t)]) == [(1, "silent")], "the other not"
    assert told(roster.broken(MemberId("prefill-0"), Incarnation(1), 21.35)) == [(1, "silent")]
