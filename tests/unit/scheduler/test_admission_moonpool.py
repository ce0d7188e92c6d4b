from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_of_members import Cluster, prefill_seconds, step_seconds

from moonpool.core.errors import STATUS, Reason
from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.admission.moonpool import MoonpoolAdmission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.policy import Policy


def small(
    admission: MoonpoolAdmission | None = None, *, prefills: int = 1, taught: bool = True, policy: Policy | None = None
) -> Cluster:
    cluster = Cluster(Conductor(policy=policy, admission=admission or MoonpoolAdmission()))
    for node in "ab":
        cluster.join(f"store-{node}", Role.STORE, node)
    names = [f"prefill-{i}" for i in range(prefills)] + ["decode-0"]
    for name in names:
        cluster.join(name, Role.DECODE if name == "decode-0" else Role.PREFILL, "b" if name == "decode-0" else "a")
    if taught:
        cluster.teach(*names)
    return cluster


def ask(
    cluster: Cluster,
    request: str = "r",
    tokens: int = 500,
    *,
    ttft_ms: float | None = None,
    tbt_ms: float | None = None,
    tenant: str = "default",
    priority: int = 0,
) -> Placement | Refusal:
    asked = PlaceRequest(request, 1, (), tokens, 64, Targets(ttft_ms, tbt_ms), tenant, priority=priority)
    answer = cluster.conductor.place(asked, cluster.now)
    assert isinstance(answer, Placement | Refusal)
    return answer


def end(cluster: Cluster, request: str, *, ttft_ms: float = 100.0, tbt_ms: float = 10.0, tokens: int = 20) -> None:
    cluster.conductor.finished(Finished(request, 1, 0, ttft_ms, tbt_ms, tokens), cluster.now)


def queue(cluster: Cluster, tokens: int) -> None:
    cluster.report("prefill-0", [LiveAttempt("q", 1, tokens, tokens)] if tokens else [])


def decode(cluster: Cluster, sequences: int, context: int = 1_000, *, left: int = 400) -> None:
    attempts = [LiveAttempt(f"d{i}", 1, context, left, output_tokens=10) for i in range(sequences)]
    cluster.report("decode-0", attempts)


def refused(answer: Placement | Refusal) -> Refusal:
    assert isinstance(answer, Refusal), answer
    assert answer.retry_after_s > 0
    assert any(c.isdigit() for c in answer.message)
    assert STATUS[answer.reason][0] == 429
    return answer


def test_a_prompt_that_would_wait_too_long_is_refused_with_the_numbers_and_let_in_when_told_to_come_again() -> None:
    cluster = small()
    queue(cluster, 4_000)
    refusal = refused(ask(cluster, ttft_ms=2_000))
    assert refusal.reason is Reason.TARGETS_MISSED
    assert "predicted time to first token 45" in refusal.message
    assert "target 2000 ms" in refusal.message
    assert "waiting at prefill-0" in refusal.message
    assert refusal.retry_after_s == pytest.approx(prefill_seconds(4_000) + prefill_seconds(500) - 2.0, abs=0.15)
    cluster.now += refusal.retry_after_s + 0.01
    assert isinstance(ask(cluster, ttft_ms=2_000), Placement)


def test_a_prompt_for_which_an_idle_worker_is_too_slow_is_told_so() -> None:
    assert "an idle worker would probably miss it too" in refused(ask(small(), tokens=4_000, ttft_ms=1_000)).message


def test_a_full_decode_worker_is_refused_and_the_wait_follows_from_when_answers_end() -> None:
    cluster = small()
    target = 1e3 * step_seconds(8, 8_000)
    decode(cluster, 12, left=100)
    refusal = refused(ask(cluster, tbt_ms=target))
    assert "predicted time between tokens" in refusal.message
    assert "decode-0" in refusal.message
    assert 0.1 < refusal.retry_after_s < 100 * step_seconds(12, 12_000) + 1.0
    decode(cluster, 5)
    assert isinstance(ask(cluster, tbt_ms=target), Placement)


def test_accepted_prompts_that_are_still_being_computed_count_for_the_decode_worker_at_once() -> None:
    cluster = small()
    answers = [ask(cluster, f"r{i}", tbt_ms=1e3 * step_seconds(6, 4_000)) for i in range(12)]
    assert 3 <= sum(isinstance(answer, Placement) for answer in answers) <= 6
    refused(answers[-1])


def test_prompts_that_wait_for_a_prefill_worker_count_for_the_decode_worker_too() -> None:
    cluster = small(policy=make_policy("moonpool"))
    cluster.report("prefill-0", [LiveAttempt("q", 1, 3_000, 3_000)])
    asked = [PlaceRequest(f"r{i}", 1, (), 500, 64, Targets(None, 1e3 * step_seconds(6, 4_000))) for i in range(12)]
    answers = [cluster.conductor.place(one, cluster.now) for one in asked]
    assert 3 <= sum(isinstance(answer, Later) for answer in answers) <= 6
    assert isinstance(answers[-1], Refusal)


def test_prompts_that_wait_for_a_prefill_worker_count_as_queued() -> None:
    cluster = small(MoonpoolAdmission(queued_tokens=5_000), policy=make_policy("moonpool"))
    cluster.report("prefill-0", [LiveAttempt("q", 1, 3_000, 3_000)])
    asked = [PlaceRequest(f"r{i}", 1, (), 700, 64, Targets()) for i in range(4)]
    answers = [cluster.conductor.place(one, cluster.now) for one in asked]
    assert [isinstance(answer, Later) for answer in answers] == [True, True, False, False]


def test_what_nothing_sure_is_known_of_is_let_in() -> None:
    cluster = small(taught=False)
    queue(cluster, 100_000)
    decode(cluster, 50)
    assert isinstance(ask(cluster, ttft_ms=1.0, tbt_ms=1.0), Placement)


def test_a_request_without_targets_is_let_in_however_slow_it_will_be() -> None:
    cluster = small()
    queue(cluster, 15_000)
    decode(cluster, 25)
    assert isinstance(ask(cluster), Placement)


def test_misses_that_were_not_predicted_make_it_more_careful_and_success_makes_it_bold_again() -> None:
    cluster = small()
    target = 1e3 * prefill_seconds(500) / 0.85

    def feed(took: float, times: int) -> None:
        for i in range(times):
            assert isinstance(ask(cluster, f"f{i}", ttft_ms=1e3 * prefill_seconds(500) / 0.8), Placement)
            end(cluster, f"f{i}", ttft_ms=took)
            cluster.now += 1.0

    assert isinstance(ask(cluster, "before", ttft_ms=target), Placement)
    end(cluster, "before")
    admission = cluster.conductor.admission
    assert isinstance(admission, MoonpoolAdmission)
    for _ in range(64):
        admission.ttft_curve.add(0.8, 1.3)
    refused(ask(cluster, "careful", ttft_ms=target))
    for _ in range(1_000):
        admission.ttft_curve.add(0.8, 0.8)
    assert isinstance(ask(cluster, "bold", ttft_ms=target), Placement)
    end(cluster, "bold")
    feed(400.0, 3)


def test_what_ended_teaches_the_curves_by_what_was_predicted() -> None:
    cluster = small()
    admission = cluster.conductor.admission
    assert isinstance(admission, MoonpoolAdmission)
    for i in range(40):
        queue(cluster, 50)  # what an idle worker took longer would count as time outside of workers
        ask(cluster, f"r{i}", ttft_ms=1e3 * (prefill_seconds(500) + prefill_seconds(50)) / 0.7)
        end(cluster, f"r{i}", ttft_ms=900.0)
        cluster.now += 1.0
    assert admission.ttft_curve.chance(0.55) < 0.01
    assert admission.ttft_curve.chance(0.75) > 0.5


def test_attempts_that_failed_or_were_left_teach_nothing() -> None:
    cluster = small()
    admission = cluster.conductor.admission
    assert isinstance(admission, MoonpoolAdmission)
    for i in range(64):
        ask(cluster, f"r{i}", ttft_ms=1e3 * prefill_seconds(500) / 0.7)
        cluster.conductor.finished(Finished(f"r{i}", 1, 0, 9_000.0, 0.0, 0, outcome="cancelled"), cluster.now)
        cluster.now += 1.0
    assert admission.ttft_curve.chance(0.75) < 0.01


def test_a_low_priority_cannot_take_the_share_kept_for_a_higher_one() -> None:
    cluster = small(MoonpoolAdmission(reserve=0.3))
    queue(cluster, 1_000)
    target = 1e3 * (prefill_seconds(500) + prefill_seconds(1_000)) / 0.9
    assert isinstance(ask(cluster, "low", ttft_ms=target), Placement), "nobody above it: nothing is kept"
    end(cluster, "low")
    ask(cluster, "high", ttft_ms=target, priority=1)
    end(cluster, "high")
    refusal = refused(ask(cluster, "low", ttft_ms=target))
    assert "30 % of capacity is kept from priority 0 for 1 above it" in refusal.message
    assert isinstance(ask(cluster, "high", ttft_ms=target, priority=1), Placement)
    end(cluster, "high")
    queue(cluster, 0)
    assert isinstance(ask(cluster, "idle", ttft_ms=1e3 * prefill_seconds(500) / 0.9), Placement), (
        "an idle cluster keeps nothing"
    )
    end(cluster, "idle")
    queue(cluster, 1_000)
    cluster.now += 1_000.0
    queue(cluster, 1_000)
    assert isinstance(ask(cluster, "later", ttft_ms=target), Placement), "the higher priority has long not been seen"


def test_a_tenant_over_its_fair_share_is_refused_first_under_load_and_never_when_idle() -> None:
    cluster = small(MoonpoolAdmission(fair=0.3))
    for i in range(10):
        ask(cluster, f"g{i}", tenant="greedy")
        end(cluster, f"g{i}")
    ask(cluster, "m", tenant="modest")
    end(cluster, "m")
    queue(cluster, 1_000)
    target = 1e3 * (prefill_seconds(500) + prefill_seconds(1_000)) / 0.9
    refusal = refused(ask(cluster, "more", ttft_ms=target, tenant="greedy"))
    assert "tenant 'greedy', which lately had 1.8" in refusal.message
    assert isinstance(ask(cluster, "few", ttft_ms=target, tenant="modest"), Placement)
    end(cluster, "few")
    queue(cluster, 0)
    assert isinstance(ask(cluster, "idle", ttft_ms=1e3 * prefill_seconds(500) / 0.9, tenant="greedy"), Placement)


def test_queued_prompt_tokens_are_bounded_whatever_the_targets() -> None:
    cluster = small(MoonpoolAdmission(queued_tokens=2_000))
    answers = [ask(cluster, f"r{i}", 700) for i in range(4)]
    assert [isinstance(answer, Placement) for answer in answers] == [True, True, False, False]
    refusal = refused(answers[-1])
    assert refusal.reason is Reason.OVERLOADED
    assert "1400 prompt tokens wait to be computed and this one adds 700, queued_tokens is 2000" in refusal.message


def test_queued_requests_are_bounded_whatever_their_size() -> None:
    cluster = small(MoonpoolAdmission(queued_requests=3))
    answers = [ask(cluster, f"r{i}", 10) for i in range(5)]
    assert [isinstance(answer, Placement) for answer in answers] == [True, True, True, False, False]
    assert "queued_requests is 3" in refused(answers[-1]).message


def test_a_giant_prompt_is_let_into_an_idle_cluster() -> None:
    cluster = small(MoonpoolAdmission(queued_tokens=2_000))
    assert isinstance(ask(cluster, "giant", 100_000), Placement)
    end(cluster, "giant")
    assert isinstance(ask(cluster, "giant", 12_000, ttft_ms=1e3 * prefill_seconds(12_000) / 0.9), Placement)
    refused(ask(cluster, "next", 100_000))


def test_nothing_is_remembered_of_requests_that_ended() -> None:
    cluster = small()
    admission = cluster.conductor.admission
    assert isinstance(admission, MoonpoolAdmission)
    for i in range(30):
        ask(cluster, f"r{i}", 50)
    assert admission.open == 30
    for i in range(30):
        end(cluster, f"r{i}")
        end(cluster, f"r{i}")
    assert admission.open == 0


loads = st.tuples(st.integers(0, 6_000), st.integers(0, 20), st.integers(0, 2_000))


@settings(max_examples=60, deadline=None)
@given(loads, loads, st.floats(100, 8_000), st.floats(20, 80), st.lists(st.tuples(st.floats(0.3, 1.3), st.floats(0.2, 2.0))))
def test_more_load_never_turns_a_refusal_into_an_acceptance(
    one: tuple[int, int, int], more: tuple[int, int, int], ttft_ms: float, tbt_ms: float, history: list[tuple[float, float]]
) -> None:
    answers = []
    for queued, sequences, context in (one, tuple(a + b for a, b in zip(one, more, strict=True))):
        admission = MoonpoolAdmission()
        cluster = small(admission)
        for ratio, measured in history:
            admission.ttft_curve.add(ratio, measured)
            admission.tbt_curve.add(ratio, measured)
        cluster.report("prefill-0", [LiveAttempt(f"q{i}", 1, queued, queued) for i in range(queued > 0)])
        cluster.report("decode-0", [LiveAttempt(f"d{i}", 1, context, 300, output_tokens=5) for i in range(sequences)])
        answers.append(ask(cluster, ttft_ms=ttft_ms, tbt_ms=tbt_ms))
    if isinstance(answers[0], Refusal):
        refused(answers[0])
        refused(answers[1])
