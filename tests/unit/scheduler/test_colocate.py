"""Prompts that the conductor leaves to a decode worker."""

from __future__ import annotations

import pytest
from support.cluster_of_members import Cluster, keys

from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt, PrefillTiming
from moonpool.core.placement import Later, Placement, PlaceRequest, Refusal
from moonpool.core.request import Targets
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.policies.moonpool import Moonpool

TBT_MS = 400.0


def cluster(*, colocate: float = 512.0, busy_s: float = 0.0, paced: float = 0.0) -> Cluster:
    """One prefill worker, busy for a while, and two decode workers with nothing to do."""
    made = Cluster(Conductor(policy=Moonpool(colocate=colocate, chunk=128.0, paced=paced)))
    for node in "ab":
        made.join(f"store-{node}", Role.STORE, node)
    made.join("prefill-0", Role.PREFILL, "a")
    made.join("decode-0", Role.DECODE, "b")
    made.join("decode-1", Role.DECODE, "b")
    made.teach("prefill-0", "decode-0", "decode-1")
    if busy_s:
        made.report("prefill-0", [LiveAttempt("other", 1, int(busy_s * 1e3), int(busy_s * 1e3))])
    return made


def answered(of: Cluster, tokens: int, prompt: tuple[bytes, ...] = (), tbt_ms: float = TBT_MS) -> Placement | Refusal | Later:
    return of.conductor.place(PlaceRequest("r", 1, prompt, tokens, 32, Targets(None, tbt_ms)), of.now)


def placed(of: Cluster, tokens: int, prompt: tuple[bytes, ...] = ()) -> Placement:
    answer = answered(of, tokens, prompt)
    assert isinstance(answer, Placement), answer
    return answer


def test_a_short_prompt_is_computed_where_it_is_decoded_while_prefill_workers_are_busy() -> None:
    answer = placed(cluster(busy_s=3.0), 200)
    assert answer.prefill == answer.decode
    assert answer.decode.id in ("decode-0", "decode-1")
    assert 0.0 < answer.predicted_ttft_ms < 1_000.0


def test_an_idle_prefill_worker_computes_it() -> None:
    assert placed(cluster(), 200).prefill.id == "prefill-0"


def test_a_long_prompt_waits_for_a_prefill_worker() -> None:
    assert isinstance(answered(cluster(busy_s=3.0), 4_000), Later)


def test_a_long_prompt_that_is_cached_there_is_short() -> None:
    made, prompt = cluster(busy_s=3.0), keys(1, 60)
    made.stored("b", prompt, store="store-b")
    answer = placed(made, 1_000, prompt)
    assert answer.prefill == answer.decode
    assert sum(segment.count for segment in answer.segments) == 60


@pytest.mark.parametrize(("tbt_ms", "colocated"), [(60.0, False), (400.0, True)])
def test_a_step_with_a_chunk_in_it_must_meet_the_time_between_tokens(tbt_ms: float, colocated: bool) -> None:
    made = cluster(busy_s=3.0)
    answer = answered(made, 200, tbt_ms=tbt_ms)
    assert (isinstance(answer, Placement) and answer.prefill == answer.decode) is colocated


@pytest.mark.parametrize(("tbt_ms", "colocated"), [(20.0, False), (60.0, True)])
def test_where_workers_cut_chunks_only_the_step_itself_must_meet_it(tbt_ms: float, colocated: bool) -> None:
    made = cluster(busy_s=3.0, paced=1.0)
    answer = answered(made, 200, tbt_ms=tbt_ms)
    assert (isinstance(answer, Placement) and answer.prefill == answer.decode) is colocated


def test_switched_off_nothing_is_left_to_decode_workers() -> None:
    assert isinstance(answered(cluster(colocate=0.0, busy_s=3.0), 200), Later)


def test_what_a_decode_worker_computes_for_others_counts_as_its_wait() -> None:
    made = cluster(busy_s=0.5)
    for name in ("decode-0", "decode-1"):
        made.report(name, [LiveAttempt(f"of {name}", 1, 2_000, 30, prompt_left=2_000)])
    assert isinstance(answered(made, 200, tbt_ms=5_000.0), Later)


def test_a_decode_worker_that_never_computed_a_prompt_is_judged_by_prefill_workers() -> None:
    made = Cluster(Conductor(policy=Moonpool(colocate=512.0)))
    for node in "ab":
        made.join(f"store-{node}", Role.STORE, node)
    made.join("prefill-0", Role.PREFILL, "a")
    made.join("decode-0", Role.DECODE, "b")
    made.report("prefill-0", prefills=[PrefillTiming(n, 0, 0.01 + 2e-3 * n) for n in (64, 256, 1_000, 4_000) for _ in range(2)])
    board = made.conductor._view.board
    row = board.row[made.members["decode-0"].id]
    assert board.prefill_fit[1, row] == pytest.approx(2e-3, rel=0.05)
    assert board.prefill_reach[row] > 0.0
