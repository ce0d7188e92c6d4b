"""Waits that the conductor predicts where prefill workers do not compute in order of arrival."""

from __future__ import annotations

import pytest
from support.cluster_of_members import Cluster, prefill_seconds

from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.prefill_queue import Rule


def one_prefill_worker(rule: Rule | None) -> Cluster:
    cluster = Cluster(Conductor(policy=make_policy("pooled_min_ttft", {}), rule=rule))
    cluster.join("store-a", Role.STORE, "a")
    cluster.join("prefill-0", Role.PREFILL, "a")
    cluster.join("decode-0", Role.DECODE, "a")
    cluster.teach("prefill-0", "decode-0")
    return cluster


RUNNING = LiveAttempt("running", 1, 2_000, 1_000, running=True)  # one more second of it
LONG = LiveAttempt("long", 1, 4_000, 4_000)


@pytest.mark.parametrize(
    ("rule", "tokens", "waits_s"),
    [(None, 100, 5.0), (Rule(shortest=True), 100, 1.0), (Rule(shortest=True), 4_500, 5.0)],
    ids=["in order of arrival", "a short one among long ones", "the longest one"],
)
def test_a_prompt_waits_for_what_goes_before_it(rule: Rule | None, tokens: int, waits_s: float) -> None:
    cluster = one_prefill_worker(rule)
    cluster.report("prefill-0", [RUNNING, LONG])
    predicted_s = cluster.placed("r", tokens).predicted_ttft_ms / 1e3
    assert predicted_s == pytest.approx(waits_s + prefill_seconds(tokens), abs=0.1)


def test_booked_prompts_wait_there_too_until_they_are_over() -> None:
    cluster = one_prefill_worker(Rule(shortest=True))
    for name in ("a", "b"):
        cluster.placed(name, 500)
    waits = [cluster.placed(f"r{i}", 600).predicted_ttft_ms / 1e3 - prefill_seconds(600) for i in range(2)]
    assert waits == pytest.approx([1.0, 1.6], abs=0.1)
    for name in ("a", "b", "r0", "r1"):
        cluster.finish(name)
    assert cluster.placed("last", 600).predicted_ttft_ms / 1e3 == pytest.approx(prefill_seconds(600), abs=0.1)


def test_who_waits_since_long_ago_is_not_passed_by_newcomers() -> None:
    cluster = one_prefill_worker(Rule(shortest=True, age_weight=0.0, wait_cap_s=10.0))
    cluster.report("prefill-0", [RUNNING, LONG])
    cluster.now += 20.0
    cluster.report("prefill-0", [RUNNING, LONG])
    predicted_s = cluster.placed("r", 100).predicted_ttft_ms / 1e3
    assert predicted_s == pytest.approx(5.0 + prefill_seconds(100), abs=0.1)


def test_a_worker_that_left_takes_its_queue_along() -> None:
    cluster = one_prefill_worker(Rule(shortest=True))
    cluster.report("prefill-0", [RUNNING, LONG])
    cluster.join("prefill-0", Role.PREFILL, "a")
    assert cluster.placed("r", 5_000).predicted_ttft_ms / 1e3 == pytest.approx(prefill_seconds(5_000), rel=0.1)
