from __future__ import annotations

import json

import pytest
from support.cluster_of_members import BLOCK, Cluster, keys, prefill_seconds, split

from moonpool.core.errors import Reason
from moonpool.core.events import Tier
from moonpool.core.ids import Role
from moonpool.core.membership import LiveAttempt, Liveness, PrefillTiming
from moonpool.core.placement import Placement, Refusal, Segment, Source


def test_a_request_without_targets_is_placed_before_anything_was_measured() -> None:
    placement = split().placed("r")
    assert (placement.prefill.node, placement.decode.id) == ("a", "decode-0")
    assert placement.prefill.address == f"{placement.prefill.id}:1"
    assert (placement.predicted_ttft_ms, placement.predicted_tbt_ms) == (0.0, 0.0)


def test_targets_refuse_nothing_before_anything_was_measured() -> None:
    assert isinstance(split().place("r", 100_000, ttft_ms=1.0, tbt_ms=1.0), Placement)


def test_idle_equal_workers_take_turns() -> None:
    cluster = split(prefills=3, decodes=2, taught=True)
    chosen = []
    for i in range(6):
        placement = cluster.placed(f"r{i}")
        chosen.append((placement.prefill.id, placement.decode.id))
        cluster.finish(f"r{i}")
        cluster.now += 1.0
    assert [p for p, _ in chosen] == ["prefill-0", "prefill-1", "prefill-2"] * 2
    assert [d for _, d in chosen] == ["decode-0", "decode-1"] * 3


def test_a_worker_that_has_done_nothing_yet_is_judged_by_what_others_of_its_role_measured() -> None:
    cluster = split()
    first = cluster.placed("r0", 4_000)
    fast = [PrefillTiming(n, 0, 1e-3 + 1e-6 * n) for n in (64, 256, 1_000, 4_000)]  # a thousand times the first guess
    cluster.report(first.prefill.id, prefills=fast)
    second = cluster.placed("r1", 4_000)
    assert second.prefill.id != first.prefill.id
    assert 0.0 < second.predicted_ttft_ms < 10.0


def test_booked_work_sends_the_next_request_elsewhere() -> None:
    cluster = split(taught=True)
    first = cluster.placed("long", 4_000)
    others = {cluster.placed(f"r{i}", 50).prefill.id for i in range(10)}
    assert first.prefill.id not in others


def test_reported_work_of_others_sends_the_request_elsewhere() -> None:
    cluster = split(taught=True)
    cluster.report("prefill-0", [LiveAttempt(f"x{i}", 1, 500, 500) for i in range(20)])
    assert {cluster.placed(f"r{i}", 50).prefill.id for i in range(10)} == {"prefill-1"}


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_are_reused_fetched_and_recomputed_in_order(whole: bool) -> None:
    """prefill-0 has 2 blocks in pages, its node 5, node b 9 of 12; ``whole``: node b has all of them."""
    cluster = split(prefills=1, taught=True)
    prompt = keys(1, 12)
    cluster.stored("prefill-0", prompt[:2], tier=Tier.G1)
    cluster.stored("a", prompt[:5], store="store-a")
    cluster.stored("b", prompt if whole else prompt[:9], store="store-b")
    placement = cluster.placed("r", 12 * BLOCK, prompt=prompt)
    middle = (Segment(0, 2, Source.REUSE), Segment(2, 3, Source.FETCH, cluster.members["store-a"].node))
    b = cluster.members["store-b"].node
    rest = (Segment(5, 7, Source.FETCH, b),) if whole else (Segment(5, 4, Source.FETCH, b), Segment(9, 3, Source.RECOMPUTE))
    assert placement.segments == (*middle, *rest)
    cached = 12 * BLOCK - 1 if whole else 9 * BLOCK
    assert placement.predicted_ttft_ms == pytest.approx(1e3 * prefill_seconds(12 * BLOCK, cached), rel=0.02)
    told = cluster.conductor.explain("r")
    assert told is not None
    assert told["decisions"][0]["predicted"]["cached_tokens"] == cached


def test_a_fetch_that_costs_more_than_computing_is_not_made() -> None:
    cluster = split(prefills=1)
    slow = [PrefillTiming(n, n // 2, prefill_seconds(n, n // 2) + 0.004 * n, loaded_tokens=n // 2) for n in (64, 512, 2_000)]
    cluster.report("prefill-0", prefills=[PrefillTiming(n, 0, prefill_seconds(n)) for n in (64, 512, 2_000)] + slow)
    prompt = keys(1, 8)
    cluster.stored("a", prompt[:2], store="store-a")
    cluster.stored("b", prompt, store="store-b")
    node_a = cluster.members["store-a"].node
    assert cluster.placed("r", 8 * BLOCK + 1, prompt=prompt).segments == (
        Segment(0, 2, Source.FETCH, node_a),
        Segment(2, 6, Source.RECOMPUTE),
    )


def test_a_worker_whose_node_has_no_live_store_fetches_nothing() -> None:
    cluster = split(prefills=1, taught=True)
    prompt = keys(1, 4)
    cluster.stored("prefill-0", prompt[:1], tier=Tier.G1)
    cluster.stored("b", prompt, store="store-b")
    cluster.change("store-a", Liveness.SILENT)
    assert cluster.placed("r", 70, prompt=prompt).segments == (Segment(0, 1, Source.REUSE), Segment(1, 3, Source.RECOMPUTE))


def test_a_cached_prefix_wins_until_its_worker_waits_longer_than_computing_takes() -> None:
    cluster = split(taught=True)
    prompt = keys(1, 60)
    cluster.stored("prefill-1", prompt, tier=Tier.G1)
    tokens = 60 * BLOCK + 5
    assert cluster.placed("warm", tokens, prompt=prompt).prefill.id == "prefill-1"
    cluster.finish("warm")
    cluster.report("prefill-1", [LiveAttempt("x", 1, 3_000, 3_000)])
    assert cluster.placed("again", tokens, prompt=prompt).prefill.id == "prefill-0"


def test_excluded_peers_are_passed_over_and_named_when_nobody_is_left() -> None:
    cluster = split()
    assert cluster.placed("r", exclude=["prefill-0"]).prefill.id == "prefill-1"
    refusal = cluster.place("r", exclude=["prefill-0", "prefill-1"])
    assert isinstance(refusal, Refusal)
    assert refusal.reason is Reason.NO_PATH
    assert refusal.message == "no prefill worker can take the request: 2 live and ready, 2 excluded after failing it"
    assert refusal.retry_after_s > 0


def test_an_excluded_store_takes_its_decode_workers_and_its_blocks_with_it() -> None:
    cluster = split()
    cluster.stored("b", keys(1, 4), store="store-b")
    refusal = cluster.place("r", exclude=["store-b"])
    assert isinstance(refusal, Refusal)
    assert "no decode worker" in refusal.message
    assert "1 without a live store node" in refusal.message
    cluster.join("store-c", Role.STORE, "c")
    cluster.join("decode-1", Role.DECODE, "c")
    placement = cluster.placed("r", 70, prompt=keys(1, 4), exclude=["store-b"])
    assert placement.decode.id == "decode-1"
    assert placement.segments == (Segment(0, 4, Source.RECOMPUTE),)


@pytest.mark.parametrize(("prefills", "decodes", "named"), [(0, 1, "prefill"), (1, 0, "decode")])
def test_a_missing_role_is_named(prefills: int, decodes: int, named: str) -> None:
    refusal = split(prefills, decodes).place("r")
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.message) == (
        Reason.NO_PATH,
        f"no {named} worker can take the request: 0 live and ready",
    )


@pytest.mark.parametrize("exclude", [(), ("prefill-0", "store-a")])
def test_an_empty_cluster_names_both_roles(exclude: tuple[str, ...]) -> None:
    refusal = Cluster().place("r", exclude=exclude)
    assert isinstance(refusal, Refusal)
    assert "no prefill worker" in refusal.message
    assert "no decode worker" in refusal.message


def test_a_prompt_too_large_for_every_worker_says_how_much_they_hold() -> None:
    cluster = Cluster()
    cluster.join("store-a", Role.STORE, "a")
    cluster.join("both-0", Role.BOTH, "a", max_prompt=512)
    refusal = cluster.place("r", 513)
    assert isinstance(refusal, Refusal)
    assert "1 too small for 513 prompt tokens (the largest holds 512)" in refusal.message
    assert cluster.placed("r", 512).prefill.id == "both-0"


def test_workers_that_load_or_drain_get_nothing_new() -> None:
    cluster = split()
    cluster.change("prefill-0", ready=False)
    assert {cluster.placed(f"r{i}").prefill.id for i in range(4)} == {"prefill-1"}
    cluster.change("prefill-0", ready=True)
    assert {cluster.placed(f"s{i}").prefill.id for i in range(4)} >= {"prefill-0"}


def test_role_both_pairs_only_with_itself() -> None:
    cluster = split(prefills=1, decodes=1)
    cluster.join("both-0", Role.BOTH, "a")
    cluster.join("both-1", Role.BOTH, "b")
    pairs = {(p.prefill.id, p.decode.id) for i in range(30) for p in [cluster.placed(f"r{i}")]}
    assert pairs == {("prefill-0", "decode-0"), ("both-0", "both-0"), ("both-1", "both-1")}
    cluster.change("prefill-0", Liveness.GONE)
    pairs = {(p.prefill.id, p.decode.id) for i in range(30) for p in [cluster.placed(f"s{i}")]}
    assert pairs == {("both-0", "both-0"), ("both-1", "both-1")}


def test_unfinished_prompts_of_role_both_count_as_waiting() -> None:
    cluster = Cluster()
    for i in range(2):
        cluster.join(f"both-{i}", Role.BOTH, "a")
    cluster.teach("both-0", "both-1")
    cluster.report("both-0", [LiveAttempt("x", 1, 2_000, 10, prompt_left=2_000)])
    cluster.report("both-1", [LiveAttempt(f"y{i}", 1, 100, 10) for i in range(3)])
    assert {cluster.placed(f"r{i}", 20).prefill.id for i in range(3)} == {"both-1"}


def test_a_decode_worker_without_room_is_the_last_choice() -> None:
    cluster = split(prefills=1, decodes=2, taught=True)
    cluster.report("decode-0", free_pages=2)
    cluster.report("decode-1", [LiveAttempt(f"x{i}", 1, 100, 10) for i in range(3)], free_pages=100)
    assert cluster.placed("r", 100).decode.id == "decode-1"
    assert cluster.placed("s", 20).decode.id == "decode-0"


def test_equal_holders_of_a_prefix_take_turns_as_sources() -> None:
    cluster = split(prefills=1, taught=True)
    prompt = keys(1, 8)
    for node in "bcd":
        if node != "b":
            cluster.join(f"store-{node}", Role.STORE, node)
        cluster.stored(node, prompt, store=f"store-{node}")
    sources = []
    for i in range(6):
        (segment,) = cluster.placed(f"r{i}", 8 * BLOCK, prompt=prompt).segments
        sources.append(segment.node)
        cluster.finish(f"r{i}")
    assert sorted(sources) == ["b", "b", "c", "c", "d", "d"]


def test_explain_tells_inputs_candidates_answer_and_what_came_of_it() -> None:
    cluster = split(taught=True)
    cluster.place("r", 200, prompt=keys(1, 12), ttft_ms=1.0)
    cluster.now += 1.0
    chosen = cluster.placed("r", 200, prompt=keys(1, 12), ttft_ms=5_000.0, attempt=2)
    cluster.finish("r", 2, ttft_ms=321.0, cached=16)
    told = json.loads(json.dumps(cluster.conductor.explain("r")))
    refused, placed = told["decisions"]
    assert refused["refused"]["reason"] == "targets_missed"
    assert refused["asked"]["targets"] == {"ttft_ms": 1.0, "tbt_ms": None}
    assert refused["actual"] is None
    assert placed["asked"]["blocks"] == 12
    assert placed["placed"]["prefill"]["id"] == chosen.prefill.id
    assert {c["worker"] for c in placed["prefill_candidates"]} == {"prefill-0", "prefill-1"}
    assert placed["prefill_candidates"][0]["worker"] == chosen.prefill.id
    assert placed["decode_candidates"][0]["batch"] == 0
    assert placed["actual"]["ttft_ms"] == 321.0
    assert cluster.conductor.explain("nobody") is None


def test_the_log_keeps_the_newest_decisions() -> None:
    cluster = split()
    cluster.conductor._log._limit = 10
    for i in range(30):
        cluster.place(f"r{i // 2}", attempt=i % 2 + 1)
    assert cluster.gauge("decisions_recorded") == 10
    assert cluster.conductor.explain("r9") is None
    told = cluster.conductor.explain("r10")
    assert told is not None
    assert [d["asked"]["attempt"] for d in told["decisions"]] == [1, 2]
