"""The simulator runs the production rules: with any one of them taken away its outcome is another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.sim_trace import conversations, small_cluster

from moonpool.decode_worker.batcher import Batcher
from moonpool.kvstore.eviction.lru import Lru
from moonpool.prefill_worker.chunk_planner import ChunkPlanner
from moonpool.scheduler.bookings import Coming, Ledger
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.policy import Asked
from moonpool.sim.outcome import Outcome
from moonpool.sim.run import simulate

ROWS = conversations(200, seed=3, every_s=0.4, answers=150)
CLUSTER = small_cluster(order="shortest")
CLUSTER = CLUSTER.changed(
    groups=tuple(group.model_copy(update={"pool_tokens": 60_000, "device_tokens": 110_000}) for group in CLUSTER.groups)
)


def replay() -> Outcome:
    return simulate(ROWS, CLUSTER, policy=make_policy("pooled_min_ttft"))


@pytest.fixture(scope="module")
def sound() -> Outcome:
    return replay()


def without_fetch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Asked, "pooled", Asked.local)


def without_recency(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lru, "used", lambda self, rows, first, use, now: None)


def without_shortest_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkPlanner, "_by_work", ChunkPlanner._by_standing)


def without_bookings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "coming", lambda self, worker: Coming())


def without_admission_in_order(patch: pytest.MonkeyPatch) -> None:
    """Sequences get pages last come, first served."""
    admit = Batcher.admit

    def backwards(self: Batcher) -> list[object]:
        self._waiting.reverse()
        try:
            return admit(self)  # type: ignore[return-value]
        finally:
            self._waiting.reverse()

    patch.setattr(Batcher, "admit", backwards)


RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fetch": without_fetch,
    "recency": without_recency,
    "shortest-first": without_shortest_first,
    "bookings": without_bookings,
    "admission-in-order": without_admission_in_order,
}


@pytest.mark.parametrize("rule", list(RULES))
def test_without_a_production_rule_the_outcome_is_another(rule: str, sound: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule](monkeypatch)
    assert [r.ttft_s for r in replay().requests] != [r.ttft_s for r in sound.requests]


def test_with_all_rules_the_outcome_is_the_same(sound: Outcome) -> None:
    assert [r.ttft_s for r in replay().requests] == [r.ttft_s for r in sound.requests]
