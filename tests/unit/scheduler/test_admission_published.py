"""The rules of others, on one prefill and one decode worker."""

from __future__ import annotations

import pytest
from support.cluster_of_members import Cluster, prefill_seconds, step_seconds

from moonpool.core.errors import InvalidRequest, Reason
from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.admission.early_predicted import EarlyPredicted
from moonpool.scheduler.admission.make import ADMISSIONS, make_admission
from moonpool.scheduler.conductor import Conductor

EDGE = 1e3 * step_seconds(6, 6_000)


def pair(name: str, **settings: float) -> Cluster:
    cluster = Cluster(Conductor(admission=make_admission(name, settings)))
    for node in "ab":
        cluster.join(f"store-{node}", Role.STORE, node)
    cluster.join("prefill-0", Role.PREFILL, "a")
    cluster.join("decode-0", Role.DECODE, "b")
    cluster.teach("prefill-0", "decode-0")
    return cluster


def ask(
    cluster: Cluster, request: str = "r", tokens: int = 500, *, ttft_ms: float = 60e3, tbt_ms: float = EDGE
) -> Placement | Refusal:
    answer = cluster.conductor.place(PlaceRequest(request, 1, (), tokens, 64, Targets(ttft_ms, tbt_ms)), cluster.now)
    assert isinstance(answer, Placement | Refusal)
    return answer


def decode(cluster: Cluster, sequences: int, *, produced: int = 10) -> None:
    running = [LiveAttempt(f"d{i}", 1, 1_000, 400, output_tokens=produced) for i in range(sequences)]
    cluster.report("decode-0", running)


def told(refusal: Placement | Refusal | None, *words: str) -> None:
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.TARGETS_MISSED
    assert refusal.retry_after_s > 0
    for word in (*words, "target"):
        assert word in refusal.message


def test_none_lets_everybody_in() -> None:
    cluster = pair("none")
    decode(cluster, 20)
    for i in range(20):
        assert isinstance(ask(cluster, f"r{i}", ttft_ms=1.0, tbt_ms=1.0), Placement)
    assert cluster.conductor.prefilled("r0", cluster.now) is None


@pytest.mark.parametrize("name", ["baseline", "early", "early_predicted"])
def test_a_full_prefill_queue_is_refused_on_arrival(name: str) -> None:
    cluster = pair(name)
    cluster.report("prefill-0", [LiveAttempt("x", 1, 4_000, 4_000)])
    told(ask(cluster, ttft_ms=2_000.0), "time to first token 45", "waiting at prefill-0", "load 2.26 above 1.00")
    assert isinstance(ask(cluster, ttft_ms=2e3 * prefill_seconds(4_000)), Placement)


def test_the_baseline_looks_at_decode_only_once_the_prefill_is_done() -> None:
    cluster = pair("baseline")
    decode(cluster, 12)
    assert isinstance(ask(cluster), Placement)
    told(cluster.conductor.prefilled("r", cluster.now), "time between tokens", "at decode-0 now")
    assert cluster.gauge("bookings") == 0
    assert isinstance(ask(cluster, "s"), Placement)
    decode(cluster, 3)
    assert cluster.conductor.prefilled("s", cluster.now) is None


def test_early_rejection_looks_at_decode_on_arrival_but_not_at_what_is_on_its_way_there() -> None:
    cluster = pair("early")
    decode(cluster, 12)
    told(ask(cluster), "time between tokens", "at decode-0 now")
    decode(cluster, 0)
    assert all(isinstance(ask(cluster, f"r{i}"), Placement) for i in range(20))
    decode(cluster, 12, produced=0)
    assert isinstance(ask(cluster, "s"), Placement), "none of them has begun to produce"


def test_the_prediction_counts_what_is_on_its_way_and_will_not_have_ended() -> None:
    cluster = pair("early_predicted")
    placed = [isinstance(ask(cluster, f"r{i}"), Placement) for i in range(20)]
    assert placed == sorted(placed, reverse=True)
    assert 4 <= sum(placed) <= 8
    told(ask(cluster, "more"), "mean of 1 decode workers")
    cluster.now += 60.0
    assert isinstance(ask(cluster, "later"), Placement), "all of them are taken to have ended"


def test_what_answers_take_is_their_running_mean() -> None:
    cluster = pair("early_predicted")
    admission = cluster.conductor.admission
    assert isinstance(admission, EarlyPredicted)
    for i, took in enumerate((4.0, 8.0)):
        ask(cluster, f"r{i}")
        cluster.now += took + 0.5
        cluster.conductor.finished(Finished(f"r{i}", 1, 0, 500.0, 10.0, 40), cluster.now)
    ask(cluster, "left")
    cluster.conductor.finished(Finished("left", 1, 0, 0.0, 0.0, 0, outcome="cancelled"), cluster.now)
    assert admission.decode_s == pytest.approx(6.0)


def test_a_lower_limit_refuses_earlier() -> None:
    strict, plain = pair("early", limit=0.5), pair("early")
    for cluster in (strict, plain):
        decode(cluster, 3)
    assert isinstance(ask(plain), Placement)
    told(ask(strict), "above 0.50")


def test_estimates_that_are_not_sure_refuse_nobody() -> None:
    for name in ADMISSIONS:
        cluster = Cluster(Conductor(admission=make_admission(name)))
        for node in "ab":
            cluster.join(f"store-{node}", Role.STORE, node)
        cluster.join("prefill-0", Role.PREFILL, "a")
        cluster.join("decode-0", Role.DECODE, "b")
        decode(cluster, 30)
        assert isinstance(ask(cluster, ttft_ms=0.1, tbt_ms=0.1), Placement), name


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(
        InvalidRequest, match=r"scheduler\.admission: 'strict' is none of .*baseline.*early_predicted.*moonpool.*none"
    ):
        make_admission("strict")


def test_an_unknown_setting_is_told_what_there_is() -> None:
    with pytest.raises(InvalidRequest, match=r"moonpool has no 'odds'; it has chance, window_s"):
        make_admission("moonpool", {"odds": 1.0})
    with pytest.raises(InvalidRequest, match="none has no 'limit'; it has none"):
        make_admission("none", {"limit": 1.0})


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_setting_below_nothing_is_named(value: float) -> None:
    with pytest.raises(InvalidRequest, match="limit is"):
        make_admission("early", {"limit": value})
