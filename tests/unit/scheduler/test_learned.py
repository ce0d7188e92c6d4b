"""What equal workers have measured counts for all of them, each by its own speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.cluster_of_members import Cluster, split

from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, PrefillTiming

LONG = 4_000
SHORT = (200, 400, 600, 1_000)


def like(cluster: Cluster, *names: str, engine: str = "compiled") -> None:
    for name in names:
        cluster.members[name] = replace(cluster.members[name], details={"engine": engine, "device": "cpu", "dtype": "bfloat16"})
        cluster.change(name)


def took(cluster: Cluster, name: str, lengths: tuple[int, ...], *, bend: float = 0.0, times: float = 1.0) -> None:
    """``bend`` of its jobs are noise that grows with their length, as a fit on short ones takes for more than it is."""
    jobs = [PrefillTiming(n, 0, times * 1e-3 * n * (1.0 + bend * (n / 1_000 - 0.5))) for n in lengths]
    cluster.report(name, prefills=jobs)


def takes(cluster: Cluster, name: str) -> float:
    """Predicted seconds for a long prompt."""
    others = [member.id for member in cluster.members.values() if member.role is Role.PREFILL and member.id != name]
    seconds = cluster.placed("probe", LONG, exclude=others).predicted_ttft_ms / 1e3
    cluster.finish("probe")
    cluster.report(name)
    return seconds


def bent(*, alike: bool, prefills: int = 2) -> Cluster:
    """Two workers that measured the same short prompts, with noise of opposite kinds."""
    cluster = split(prefills)
    names = [f"prefill-{i}" for i in range(prefills)]
    if alike:
        like(cluster, *names)
    for _ in range(3):
        took(cluster, "prefill-0", SHORT, bend=0.5)
        took(cluster, "prefill-1", SHORT, bend=-0.5)
    return cluster


def test_equal_workers_do_not_differ_by_where_their_own_measurements_would_lead() -> None:
    alone = [takes(bent(alike=False), name) for name in ("prefill-0", "prefill-1")]
    together = [takes(bent(alike=True), name) for name in ("prefill-0", "prefill-1")]
    assert alone[0] > 2 * alone[1]
    assert together[0] < 1.2 * together[1]
    assert together == pytest.approx([LONG / 1e3] * 2, rel=0.25)


def test_one_that_has_done_nothing_yet_is_taken_for_one_of_its_kind() -> None:
    cluster = bent(alike=True, prefills=4)
    like(cluster, "prefill-3", engine="torch")
    for _ in range(3):
        took(cluster, "prefill-3", SHORT, times=9.0)
    assert takes(cluster, "prefill-2") == pytest.approx(LONG / 1e3, rel=0.25)
    assert takes(cluster, "prefill-3") == pytest.approx(9 * LONG / 1e3, rel=0.1)


def test_a_slower_one_of_its_kind_is_known_by_its_newest_jobs() -> None:
    cluster = split(3)
    like(cluster, "prefill-0", "prefill-1", "prefill-2")
    for _ in range(5):
        took(cluster, "prefill-0", SHORT, times=2.0)
        took(cluster, "prefill-1", SHORT)
        took(cluster, "prefill-2", SHORT)
    assert takes(cluster, "prefill-0") == pytest.approx(2 * LONG / 1e3, rel=0.25)
    assert takes(cluster, "prefill-1") == pytest.approx(LONG / 1e3, rel=0.25)
    for _ in range(8):
        took(cluster, "prefill-0", SHORT)
    assert takes(cluster, "prefill-0") == pytest.approx(takes(cluster, "prefill-1"), rel=0.1)


def test_what_others_of_its_kind_measure_counts_at_once_and_goes_with_the_last_of_them() -> None:
    cluster = bent(alike=True, prefills=3)
    before = takes(cluster, "prefill-2")
    for _ in range(20):
        took(cluster, "prefill-0", (LONG,), times=3.0)
        took(cluster, "prefill-1", (LONG,), times=3.0)
    assert takes(cluster, "prefill-2") > 1.5 * before
    learned = cluster.conductor._view._learned
    for name in ("prefill-0", "prefill-1", "prefill-2"):
        assert len(learned._of_kind) == 1
        cluster.change(name, Liveness.GONE)
    assert not learned._of_kind and all(kind is None for _, kind in learned._told)


def test_impossible_times_say_nothing_about_speed() -> None:
    cluster = bent(alike=True)
    before = takes(cluster, "prefill-0")
    for seconds in (float("nan"), float("inf"), -1.0, 0.0):
        cluster.report("prefill-0", prefills=[PrefillTiming(500, 0, seconds)] * 20)
    assert np.isfinite(takes(cluster, "prefill-0")) and takes(cluster, "prefill-0") == pytest.approx(before)
