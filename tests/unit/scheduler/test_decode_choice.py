"""Decode workers chosen by what is expected of them when the prompt joins."""

from __future__ import annotations

import pytest
from support.cluster_of_members import Cluster

from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt, StepTiming
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.make import make_policy


def two_decode_workers(window_s: float) -> Cluster:
    cluster = Cluster(Conductor(policy=make_policy("moonpool", {"decode_window_s": window_s, "lookahead_s": 1e6})))
    for node in ("a", "b"):
        cluster.join(f"store-{node}", Role.STORE, node)
    cluster.join("prefill-0", Role.PREFILL, "a")
    cluster.join("decode-0", Role.DECODE, "a")
    cluster.join("decode-1", Role.DECODE, "b")
    cluster.teach("prefill-0")
    steps = [StepTiming(b, c * b, 0.02 + 1e-6 * c * b) for b in (1, 4, 16) for c in (1_000, 10_000)]
    for name in ("decode-0", "decode-1"):
        cluster.report(name, steps=steps)
    return cluster


def answer(cluster: Cluster, tokens: int, count: int) -> None:
    """Requests that were answered with ``tokens`` each, one after the other."""
    for i in range(count):
        cluster.placed(f"past-{tokens}-{i}", 20)
        cluster.finish(f"past-{tokens}-{i}", ttft_ms=30.0, output=tokens)


@pytest.mark.parametrize(("window_s", "chosen"), [(0.0, "decode-1"), (5.0, "decode-0")], ids=["of now", "when it joins"])
def test_a_batch_that_will_be_gone_when_the_prompt_joins_does_not_count(window_s: float, chosen: str) -> None:
    cluster = two_decode_workers(window_s)
    soon_over = [LiveAttempt(f"x{i}", 1, 20_000, 20, output_tokens=400) for i in range(2)]
    just_begun = [LiveAttempt("y", 1, 30_000, 4_000, output_tokens=1)]
    cluster.report("decode-0", soon_over)
    cluster.report("decode-1", just_begun)
    assert cluster.placed("r", 4_000).decode.id == chosen  # its prefill takes 4 s


def test_prompts_that_are_booked_to_land_count_before_they_do() -> None:
    cluster = two_decode_workers(5.0)
    chosen = [cluster.placed(f"r{i}", 4_000).decode.id for i in range(4)]
    assert sorted(chosen) == ["decode-0", "decode-0", "decode-1", "decode-1"]


def test_a_released_booking_is_forgotten_with_the_next_report() -> None:
    cluster = two_decode_workers(5.0)
    first = cluster.placed("r0", 4_000).decode.id
    cluster.finish("r0")
    cluster.report(first, [LiveAttempt("other", 1, 10, 10, output_tokens=1)])
    board = cluster.conductor._view.board
    ahead = board.ahead(cluster.now + 4.0, 5.0, 0)
    assert ahead.context[board.row[first]] < 1_000


def test_answers_teach_how_long_the_next_ones_get() -> None:
    cluster = two_decode_workers(5.0)
    lengths = cluster.conductor._view.courses.lengths
    answer(cluster, 8, 60)
    assert lengths.sure
    assert lengths.survival("default", 1, 20).quantile(0.5) < 10
    answer(cluster, 32, 200)  # as many as were allowed: they were cut off
    assert lengths.survival("default", 1, 20).quantile(0.9) > 32


def test_a_worker_that_comes_back_has_nothing_in_its_batch() -> None:
    cluster = two_decode_workers(5.0)
    cluster.report("decode-0", [LiveAttempt("x", 1, 30_000, 4_000, output_tokens=1)])
    cluster.report("decode-1", [LiveAttempt("y", 1, 5_000, 4_000, output_tokens=1)])
    assert cluster.placed("r", 100).decode.id == "decode-1"
    cluster.join("decode-0", Role.DECODE, "a")
    assert cluster.placed("s", 100).decode.id == "decode-0"
