"""One tenant floods a simulated cluster ten times over; the other one asks now and then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.sim_trace import conversations, small_cluster

from moonpool.loadgen.trace import TraceRow
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.outcome import Outcome
from moonpool.sim.run import simulate

QUIET = conversations(40, seed=2, every_s=4.0, tokens=8_000, answers=40)
FLOOD = [
    replace(row, hash_ids=tuple(10**6 + one for one in row.hash_ids))
    for row in conversations(400, seed=4, every_s=0.4, tokens=8_000, answers=40)
]
BOTH = sorted([(row, "quiet") for row in QUIET] + [(row, "flood") for row in FLOOD], key=lambda pair: pair[0].timestamp_ms)
CLUSTER = small_cluster()


def replay(rows: list[tuple[TraceRow, str]]) -> Outcome:
    traced = [row for row, _ in rows]
    policy, admission = make_policy("moonpool"), make_admission("none")
    return simulate(traced, CLUSTER, policy=policy, admission=admission, tenants=[tenant for _, tenant in rows])


def ttfts(outcome: Outcome, rows: list[tuple[TraceRow, str]], tenant: str) -> list[float]:
    found = [outcome.requests[i].ttft_s for i, (_, whose) in enumerate(rows) if whose == tenant]
    assert all(ttft is not None for ttft in found)
    return [ttft for ttft in found if ttft is not None]


@pytest.fixture(scope="module")
def flooded() -> Outcome:
    return replay(BOTH)


def test_a_flood_of_ten_times_as_much_leaves_the_other_tenant_near_what_it_has_alone(flooded: Outcome) -> None:
    alone = [(row, "quiet") for row, tenant in BOTH if tenant == "quiet"]
    solo = float(np.mean(ttfts(replay(alone), alone, "quiet")))
    beside = float(np.mean(ttfts(flooded, BOTH, "quiet")))
    mixed = [(row, "everybody") for row, _ in BOTH]
    together = replay(mixed)
    unprotected = float(
        np.mean([together.requests[i].ttft_s or 0.0 for i, (_, tenant) in enumerate(BOTH) if tenant == "quiet"])
    )
    assert beside <= 3.0 * solo, (solo, beside, unprotected)
    assert unprotected >= 5.0 * beside, "the flood is one"


def test_nothing_is_left_over(flooded: Outcome) -> None:
    assert {what: n for what, n in flooded.leaks.items() if n} == {}
    assert len(ttfts(flooded, BOTH, "flood")) == len(FLOOD)
