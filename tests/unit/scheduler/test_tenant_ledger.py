from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.errors import InvalidRequest
from moonpool.scheduler.ledger import Cost, TenantLedger

OFFERS = Cost(16.0, 1e9, 5e8)
HALF_LIFE_S = 60.0
WEIGHTS = {"gold": 3.0}
TENANTS = ("gold", "a", "b", "c")

charges = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.tuples(st.floats(0, 100), st.floats(0, 1e9), st.floats(0, 1e9)),
        st.floats(0, 900),
    ),
    max_size=40,
)


class Remembered:
    """Keeps every charge and adds them all up anew at each question."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, tuple[float, float, float], float]] = []

    def used(self, tenant: str, now: float) -> list[float]:
        return [
            sum(cost[i] * 0.5 ** ((now - at) / HALF_LIFE_S) for name, cost, at in self.charges if name == tenant)
            for i in range(3)
        ]

    def dominant(self, used: list[float]) -> float:
        return max(u / o for u, o in zip(used, OFFERS.values(), strict=True))

    def over(self, tenant: str, now: float) -> float:
        names = {name for name, _, _ in self.charges}
        busiest = self.dominant([sum(self.used(name, now)[i] for name in names) for i in range(3)])
        if busiest == 0.0:
            return 0.0
        active = {n for n in names if self.dominant(self.used(n, now)) > 1e-3 * busiest} | {tenant}
        fair = WEIGHTS.get(tenant, 1.0) / sum(WEIGHTS.get(n, 1.0) for n in active)
        return self.dominant(self.used(tenant, now)) / busiest / fair


@settings(max_examples=100, deadline=None)
@given(charges)
def test_shares_equal_those_of_a_book_that_forgets_nothing(steps: list[tuple[str, tuple[float, float, float], float]]) -> None:
    ledger, book, now = TenantLedger(OFFERS, half_life_s=HALF_LIFE_S, weights=WEIGHTS), Remembered(), 0.0
    for tenant, cost, pause in steps:
        now += pause
        ledger.charge(tenant, Cost(*cost), now)
        book.charges.append((tenant, cost, now))
        for name in TENANTS:
            assert ledger.used(name, now).values() == pytest.approx(book.used(name, now))
            assert ledger.over(name) == pytest.approx(book.over(name, now), rel=1e-6, abs=1e-9)


def test_a_tenant_alone_is_never_over_its_share() -> None:
    ledger = TenantLedger(OFFERS)
    ledger.charge("a", Cost(1e4, 1e12, 1e12), 0.0)
    assert ledger.over("a") == pytest.approx(1.0)
    assert ledger.over("b") == 0.0


def test_the_tenant_that_used_more_is_over_and_the_other_one_under() -> None:
    ledger = TenantLedger(OFFERS)
    ledger.charge("greedy", Cost(30.0), 0.0)
    ledger.charge("modest", Cost(10.0), 0.0)
    assert ledger.over("greedy") == pytest.approx(1.5)
    assert ledger.over("modest") == pytest.approx(0.5)


def test_weights_say_how_much_is_fair() -> None:
    ledger = TenantLedger(OFFERS, weights={"gold": 3.0})
    ledger.charge("gold", Cost(30.0), 0.0)
    ledger.charge("b", Cost(10.0), 0.0)
    assert ledger.over("gold") == pytest.approx(1.0)
    assert ledger.over("b") == pytest.approx(1.0)


def test_what_counts_is_the_resource_a_tenant_uses_most_of() -> None:
    ledger = TenantLedger(OFFERS)
    ledger.charge("talks", Cost(16.0, 0.0, 0.0), 0.0)
    ledger.charge("hoards", Cost(0.0, 3e9, 0.0), 0.0)
    assert ledger.over("hoards") == pytest.approx(2.0)
    assert ledger.over("talks") == pytest.approx(2.0 / 3.0)


def test_use_is_forgiven_with_time() -> None:
    ledger = TenantLedger(OFFERS, half_life_s=10.0)
    ledger.charge("a", Cost(100.0), 0.0)
    ledger.charge("b", Cost(1.0), 0.0)
    assert ledger.over("a") > 1.9
    ledger.charge("b", Cost(99.0 * 0.5**10), 100.0)
    assert ledger.over("a") == pytest.approx(1.0, rel=0.02)


def test_a_book_kept_for_weeks_still_decays() -> None:
    ledger = TenantLedger(OFFERS, half_life_s=1.0)
    for day in range(20):
        ledger.charge("a", Cost(8.0), day * 86_400.0)
    assert ledger.used("a", 19 * 86_400.0 + 1.0).compute_s == pytest.approx(4.0)
    assert ledger.over("a") == pytest.approx(1.0)


def test_shares_follow_when_workers_come_or_go() -> None:
    ledger = TenantLedger(Cost(10.0, 10.0))
    ledger.charge("a", Cost(10.0, 0.0), 0.0)
    ledger.charge("b", Cost(0.0, 5.0), 0.0)
    assert ledger.over("b") < ledger.over("a")
    ledger.offer(Cost(100.0, 10.0))
    assert ledger.over("b") > ledger.over("a")


def test_what_was_charged_too_much_is_given_back_down_to_nothing() -> None:
    ledger = TenantLedger(OFFERS)
    ledger.charge("a", Cost(10.0, 5.0), 0.0)
    ledger.charge("a", Cost(-4.0, -9.0), 0.0)
    assert ledger.used("a", 0.0) == Cost(6.0, 0.0, 0.0)


def test_a_resource_of_which_nothing_is_offered_never_dominates() -> None:
    ledger = TenantLedger(Cost(1.0))
    ledger.charge("a", Cost(1.0, 1e30, 1e30), 0.0)
    ledger.charge("b", Cost(1.0), 0.0)
    assert ledger.over("a") == pytest.approx(1.0)


def test_tenants_beyond_the_limit_are_forgotten_oldest_first() -> None:
    ledger = TenantLedger(OFFERS, limit=2)
    for name in "abc":
        ledger.charge(name, Cost(1.0), 0.0)
    assert len(ledger) == 2
    assert ledger.used("a", 0.0) == Cost()


@pytest.mark.parametrize("half_life_s", [0.0, -1.0, float("nan")])
def test_a_half_life_that_is_none_is_named(half_life_s: float) -> None:
    with pytest.raises(InvalidRequest, match="half_life_s"):
        TenantLedger(half_life_s=half_life_s)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_named(weight: float) -> None:
    with pytest.raises(InvalidRequest, match="'a'"):
        TenantLedger(weights={"a": weight})


def test_a_weight_told_later_counts_from_then_on() -> None:
    ledger = TenantLedger(OFFERS)
    for tenant in ("a", "b"):
        ledger.charge(tenant, Cost(1.0), 0.0)
    assert ledger.fair_share("a") == pytest.approx(0.5)
    ledger.weigh("a", 3.0)
    assert ledger.fair_share("a") == pytest.approx(0.75)
    ledger.weigh("a", 0.0)
    assert ledger.fair_share("a") == pytest.approx(0.75)
    ledger.weigh("a", 1.0)
    assert ledger.fair_share("a") == pytest.approx(0.5)
