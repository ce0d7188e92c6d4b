"""When faults strike is a function of kinds, minutes and seed alone, and fair to every kind and side."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.bench.chaos.faults import FAULTS
from moonpool.bench.chaos.kinds import KINDS, SHORT, Kind, chosen
from moonpool.bench.chaos.members import MEMBERS, SIDES, possible
from moonpool.bench.chaos.schedule import LEAST, LONG_MINUTES, SIDE_RUN, Planned, least, may_strike, plan
from moonpool.bench.chaos.tally import Struck
from moonpool.core.errors import ConfigError

some_kinds = st.lists(st.sampled_from(KINDS), min_size=1, unique=True)
minutes = st.floats(0.2, 60.0)
seeds = st.integers(0, 1 << 40)


@given(some_kinds, minutes, seeds)
def test_a_plan_is_a_function_of_its_arguments_and_reaches_every_kind(kinds: list[Kind], of: float, seed: int) -> None:
    made = plan(kinds, of, seed)
    assert made == plan(kinds, of, seed)
    struck = Counter(one.kind.name for one in made)
    assert set(struck.values()) == {len(made) // len(kinds)}
    assert min(struck[kind.name] for kind in kinds) >= least(of)


@given(some_kinds, minutes, seeds)
def test_strikes_come_in_order_within_the_run_and_a_side_has_its_turn(kinds: list[Kind], of: float, seed: int) -> None:
    made = plan(kinds, of, seed)
    times = [one.at_s for one in made]
    assert times == sorted(times)
    assert times[-1] <= max(of * 60, 6.0)
    for first in range(0, len(made), SIDE_RUN):
        assert len({one.side for one in made[first : first + SIDE_RUN]}) == 1
    assert {one.side for one in made} <= set(SIDES)
    assert all(one.kind.hold_s[0] <= one.hold_s <= one.kind.hold_s[1] for one in made)


def test_another_seed_gives_another_order() -> None:
    orders = {tuple(one.kind.name for one in plan(KINDS, 20, seed)) for seed in range(5)}
    assert len(orders) == 5


def test_a_long_run_strikes_with_every_kind_as_often_as_is_asked() -> None:
    struck = Counter(one.kind.name for one in plan(KINDS, 20, 1))
    assert min(struck.values()) >= LEAST == least(LONG_MINUTES)
    assert least(LONG_MINUTES - 0.1) == 1


def test_no_kinds_no_strikes() -> None:
    assert plan([], 1, 0) == []


def test_kinds_are_chosen_by_name_or_by_its_beginning() -> None:
    assert chosen(()) == KINDS
    assert [kind.name for kind in chosen(("flip-ssd", "flip-ssd"))] == ["flip-ssd"]
    assert {kind.what for kind in chosen(("kill",))} == {"kill"}
    assert len(chosen(("kill", "kill-decode"))) == len(chosen(("kill",)))
    assert [kind.name for kind in chosen(SHORT)] == list(SHORT)
    with pytest.raises(ConfigError, match=r"'boil' is no kind of fault.*kill-prefill"):
        chosen(("boil",))


def test_every_kind_has_a_fault_and_a_name_of_its_own() -> None:
    assert {kind.what for kind in KINDS} == set(FAULTS)
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def planned(name: str, side: str = "a") -> Planned:
    return Planned(0, 0.0, chosen((name,))[0], side, 0.0, 0)


def away(*targets: str, side: str = "a") -> Struck:
    return Struck(0, "kill", side, targets, 0.0)


def test_while_one_side_is_struck_the_other_one_is_left_alone() -> None:
    assert may_strike(planned("kill-decode"), [])
    assert may_strike(planned("kill-decode"), [away("prefill-0"), away("store-a")])
    assert not may_strike(planned("kill-decode", "b"), [away("prefill-0")])


def test_nobody_is_struck_who_is_not_back() -> None:
    assert not may_strike(planned("kill-decode"), [away("decode-0")])
    assert not may_strike(planned("isolate"), [away("decode-0")]), "it may be anybody of the side"
    assert not may_strike(planned("cut-gateway-decode"), [away("decode-0")])


def test_the_registry_is_struck_alone() -> None:
    assert may_strike(planned("kill-registry"), [])
    assert not may_strike(planned("kill-registry"), [away("prefill-0")])
    assert not may_strike(planned("kill-prefill"), [away("registry", side="")])


def test_every_kind_strikes_members_of_the_cluster() -> None:
    assert all(possible(kind, side) <= set(MEMBERS) for kind in KINDS for side in SIDES)
    assert {name for kind in KINDS for side in SIDES for name in possible(kind, side)} == set(MEMBERS)
