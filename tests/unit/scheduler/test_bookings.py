from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_of_members import Cluster, keys, prefill_seconds, split

from moonpool.core.events import Tier
from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt, Liveness
from moonpool.core.placement import Placement

GAUGES = ("bookings", "booked_prefill_seconds", "booked_context_tokens", "attempts_reported")


def idle(cluster: Cluster) -> bool:
    return all(cluster.gauge(name) == 0 for name in GAUGES)


def test_finished_releases_the_booking_once() -> None:
    cluster = split(taught=True)
    cluster.placed("r", 500)
    assert cluster.gauge("bookings") == 1
    assert cluster.gauge("booked_prefill_seconds") > 0
    cluster.finish("r", attempt=2)
    assert cluster.gauge("bookings") == 1, "that attempt was never booked"
    cluster.finish("r")
    cluster.finish("r")
    cluster.finish("never placed")
    assert idle(cluster)


def test_the_next_attempt_replaces_the_booking_of_the_last_one() -> None:
    cluster = split(taught=True)
    cluster.placed("r", 500)
    cluster.placed("r", 500, attempt=2, exclude=["prefill-0"])
    assert cluster.gauge("bookings") == 1
    cluster.finish("r", attempt=1)
    assert cluster.gauge("bookings") == 1
    cluster.finish("r", attempt=2)
    assert idle(cluster)


def test_work_is_counted_once_when_the_worker_reports_what_was_booked() -> None:
    cluster = split(prefills=1, taught=True)
    cluster.placed("r", 1_000)
    wait = cluster.placed("probe", 100).predicted_ttft_ms
    cluster.finish("probe")
    cluster.report("prefill-0", [LiveAttempt("r", 1, 1_000, 1_000)])
    assert cluster.gauge("booked_prefill_seconds") == 0
    assert cluster.placed("probe", 100).predicted_ttft_ms == pytest.approx(wait, rel=0.01)
    cluster.finish("probe")
    cluster.report("prefill-0", [LiveAttempt("r", 1, 1_000, 500)])
    assert cluster.placed("probe", 100).predicted_ttft_ms < 0.7 * wait
    cluster.finish("probe")
    cluster.report("prefill-0")
    assert cluster.placed("probe", 100).predicted_ttft_ms < 0.2 * wait


def test_every_choice_of_a_prompt_counts_as_a_sequence_and_the_prompt_once() -> None:
    expected = []
    for choices in (0, 1, 16):
        cluster = split(prefills=1, taught=True)
        cluster.placed("r", 1_000, choices=choices)
        assert cluster.gauge("booked_context_tokens") == 1_000
        expected.append(cluster.placed("probe", 100).predicted_tbt_ms)
    assert expected[0] == expected[1] < expected[2]


def test_booked_work_drains_while_nobody_reports() -> None:
    cluster = split(prefills=1, taught=True)
    cluster.placed("r", 1_000)
    before = cluster.placed("probe", 100).predicted_ttft_ms
    cluster.finish("probe")
    cluster.now += 0.5
    after = cluster.placed("probe", 100).predicted_ttft_ms
    assert after == pytest.approx(before - 500, rel=0.02)


def test_short_jobs_that_ran_between_two_reports_stop_counting() -> None:
    cluster = split(prefills=1, taught=True)
    for i in range(20):
        cluster.placed(f"r{i}", 100)
        cluster.now += 0.15
    cluster.now += 0.25
    cluster.report("prefill-0")
    assert cluster.placed("probe", 100).predicted_ttft_ms == pytest.approx(1e3 * prefill_seconds(100), rel=0.05)


def test_a_waiting_job_reported_whole_counts_without_what_is_cached() -> None:
    cluster = split(prefills=1, taught=True)
    prompt = keys(1, 60)
    cluster.stored("prefill-0", prompt, tier=Tier.G1)
    cluster.placed("warm", 1_000, prompt=prompt)
    cluster.report("prefill-0", [LiveAttempt("warm", 1, 1_000, 1_000)])
    waiting = cluster.placed("probe", 100).predicted_ttft_ms
    assert waiting == pytest.approx(1e3 * (prefill_seconds(1_000, 960) + prefill_seconds(100)), rel=0.05)


def test_an_attempt_that_the_decode_worker_no_longer_holds_is_released_after_a_grace() -> None:
    cluster = split(taught=True)
    cluster.placed("r")
    cluster.report("decode-0", [LiveAttempt("r", 1, 100, 32)])
    cluster.now += 0.25
    cluster.report("decode-0")
    assert cluster.gauge("bookings") == 1, "the report may have been written a moment too early"
    cluster.report("decode-0", [LiveAttempt("r", 1, 100, 32)])
    for _ in range(6):
        cluster.now += 0.25
        cluster.report("decode-0")
    assert idle(cluster)
    assert cluster.gauge("bookings_ended_by_report") == 1


def test_a_placement_that_nobody_used_is_released() -> None:
    cluster = split(taught=True)
    cluster.placed("r")
    for _ in range(30):
        cluster.now += 0.25
        for name in ("prefill-0", "prefill-1", "decode-0"):
            cluster.report(name)
    assert idle(cluster)


def test_a_booking_whose_workers_say_nothing_expires_with_the_budget_of_its_request() -> None:
    cluster = split(taught=True)
    cluster.placed("r")
    cluster.now += 119.0
    assert cluster.gauge("bookings") == 1
    cluster.now += 1.1
    assert idle(cluster)
    assert cluster.gauge("bookings_expired") == 1


@pytest.mark.parametrize("lost", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("how", [Liveness.SILENT, Liveness.GONE])
def test_the_loss_of_either_worker_releases_the_booking(lost: str, how: Liveness) -> None:
    cluster = split(prefills=1, taught=True)
    cluster.placed("r")
    cluster.change(lost, how)
    assert idle(cluster)


def test_a_new_life_of_a_worker_starts_without_bookings_and_ignores_reports_of_the_old_one() -> None:
    cluster = split(prefills=1, taught=True)
    cluster.placed("r")
    old = cluster.lives["prefill-0"]
    cluster.join("prefill-0", Role.PREFILL, "a")
    assert idle(cluster)
    cluster.lives["prefill-0"] = old
    cluster.report("prefill-0", [LiveAttempt("r", 1, 100, 100)])
    assert idle(cluster)
    assert cluster.gauge("reports_ignored") == 1


def test_another_conductor_sees_the_load_through_reports_alone() -> None:
    one, two = split(taught=True), split(taught=True)
    jobs = [one.placed(f"r{i}", 1_000, exclude=["prefill-1"]) for i in range(5)]
    attempts = [LiveAttempt(f"r{i}", 1, 1_000, 1_000) for i in range(len(jobs))]
    for cluster in (one, two):
        cluster.report("prefill-0", attempts)
    assert {two.placed(f"s{i}", 100).prefill.id for i in range(10)} == {"prefill-1"}


actions = st.lists(
    st.tuples(
        st.sampled_from(("place", "place", "place", "finish", "report", "report", "forget", "lose", "wait", "retry")),
        st.integers(0, 11),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_nothing_stays_booked_once_the_cluster_is_idle(steps: list[tuple[str, int]]) -> None:
    cluster = split(prefills=2, decodes=2, taught=True)
    cluster.join("both-0", Role.BOTH, "a")
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1", "both-0")
    holds: dict[str, dict[str, LiveAttempt]] = {name: {} for name in workers}
    attempt: dict[str, int] = {}
    for what, n in steps:
        request, worker = f"r{n}", workers[n % len(workers)]
        cluster.now += 0.05
        if what in ("place", "retry"):
            attempt[request] = attempt.get(request, 0) + (what == "retry" or request not in attempt)
            placement = cluster.place(request, 100 * n + 1, attempt=attempt[request], exclude=[worker] if n % 3 else [])
            if isinstance(placement, Placement):
                live = LiveAttempt(request, attempt[request], 100 * n + 1, 20, 20)
                for name in {placement.prefill.id, placement.decode.id}:
                    holds[name][request] = live
        elif what == "finish":
            cluster.finish(request, attempt.get(request, 1))
            for held in holds.values():
                held.pop(request, None)
        elif what == "forget":  # the worker drops the attempt, nobody tells the conductor
            holds[worker].pop(request, None)
        elif what == "lose":
            holds[worker].clear()
            cluster.change(worker, Liveness.SILENT if n % 2 else Liveness.GONE)
            cluster.join(worker, cluster.members[worker].role, cluster.members[worker].node)
        elif what == "report":
            cluster.report(worker, holds[worker].values())
        else:
            cluster.now += n
        assert cluster.gauge("bookings") <= len(attempt)
    for _ in range(80):
        cluster.now += 0.25
        for name in workers:
            cluster.report(name)
    assert idle(cluster)
    assert not cluster.conductor._view._ledger._by_worker
    for _ in range(len(workers)):
        board = cluster.conductor._view.board
        assert not board.load.any()
        assert (board.busy_until <= cluster.now).all()
        assert not board.context.any()
