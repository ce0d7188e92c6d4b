from __future__ import annotations

from dataclasses import asdict

import pytest
from support.sim_trace import conversations, small_cluster

from moonpool.core.errors import Bug, Reason
from moonpool.core.placement import Refusal
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.admission.none import Everything
from moonpool.scheduler.choice import Option
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.policies.pooled_min_ttft import PooledMinTtft
from moonpool.scheduler.policy import Asked
from moonpool.sim.forced import ForcedOutcome, Others, force_refused
from moonpool.sim.run import simulate


class EveryThird(Everything):
    """Refuses whom it could well serve."""

    def __init__(self) -> None:
        self.asked = 0

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        self.asked += 1
        return Refusal(Reason.OVERLOADED, "1 in 3 is refused", 1.0) if self.asked % 3 == 0 else None


class Falls(Everything):
    """Refuses one request, and falls over once that was let in all the same."""

    def __init__(self) -> None:
        self.refused = 0

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        if asked.request.request != "r3" and self.refused == 1:
            self.refused = 2
        if asked.request.request == "r3":
            self.refused = 1
            return Refusal(Reason.OVERLOADED, "request 3 is refused", 1.0)
        return None

    def finished(self, done: object, now: float) -> None:
        if getattr(done, "request", "") == "r3":
            raise RuntimeError("fell over")


class Jealous(Everything):
    """Refuses one request, and falls over when asked about others while that one is there."""

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        if asked.request.request == "r3":
            return Refusal(Reason.OVERLOADED, "request 3 is refused", 1.0)
        if any(attempt.request == "r3" for worker in asked.board.workers for attempt in worker.attempts):
            raise RuntimeError("it is here")
        return None


def forced(admission: object, *, every_s: float, samples: int = 6, tokens: int = 6_000) -> ForcedOutcome:
    rows = conversations(60, every_s=every_s, tokens=tokens)
    return force_refused(
        rows,
        small_cluster(),
        policy=PooledMinTtft,
        admission=admission,  # type: ignore[arg-type]
        samples=samples,
        at_once=2,
    )


def test_refusing_what_an_idle_cluster_could_serve_is_found_to_be_wrong() -> None:
    found = forced(EveryThird, every_s=3.0)
    assert len(found.forced) == 6
    assert all(one.met and one.false and one.harmless for one in found.forced)
    assert found.figures()["false_rejects"] == 1.0
    assert found.figures()["false_accepts"] == 0.0


def test_refusing_what_a_full_cluster_could_not_serve_is_found_to_be_right() -> None:
    found = forced(EveryThird, every_s=0.05, tokens=40_000, samples=20)
    late = [one for one in found.forced if one.row > 30]
    assert len(late) > 5
    assert all(one.company > 10 and one.missed and not one.false for one in late)
    assert all(set(one.harmed) <= set(one.missed) for one in found.forced)
    assert found.figures()["false_accepts"] > 0.5


def test_the_world_goes_on_as_if_nobody_had_been_forced_in() -> None:
    rows, cluster = conversations(60, every_s=0.2, tokens=20_000), small_cluster()
    plain = simulate(rows, cluster, policy=make_policy("algorithm1"), admission=make_admission("early"))
    found = force_refused(
        rows, cluster, policy=lambda: make_policy("algorithm1"), admission=lambda: make_admission("early"), samples=3
    )
    assert sum(r.refused is not None for r in plain.requests) > 3
    assert [asdict(r) for r in found.base.requests] == [asdict(r) for r in plain.requests]
    refused = {r.row for r in plain.requests if r.refused is not None}
    assert {one.row for one in found.forced} <= refused


@pytest.mark.parametrize("others", ["as before", "adapt"])
def test_the_admission_decides_about_later_requests_only_where_it_is_to_adapt(others: Others) -> None:
    def force() -> ForcedOutcome:
        return force_refused(
            conversations(30, every_s=0.3), small_cluster(), policy=PooledMinTtft, admission=Jealous, others=others
        )

    if others == "adapt":
        with pytest.raises(Bug, match="ended without a word"):
            force()
    else:
        assert [(one.row, one.met) for one in force().forced] == [(3, True)]


def test_equal_seeds_force_the_same_requests_and_find_the_same() -> None:
    assert forced(EveryThird, every_s=0.4).forced == forced(EveryThird, every_s=0.4).forced


def test_a_child_that_falls_over_is_no_answer() -> None:
    with pytest.raises(Bug, match="request 3 was forced in ended without a word"):
        forced(Falls, every_s=1.0)
