"""Moonpool's own placement: what waits for whom, what is fetched, computed or moved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_of_members import BLOCK, LAYOUT, Cluster, keys, prefill_seconds

from moonpool.core.events import BlockChange, BlockEvent, EventBatch, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import LiveAttempt, Liveness, MemberChange, WorkerReport
from moonpool.core.placement import Later, Placement, PlaceRequest, Segment, Source
from moonpool.core.request import Targets
from moonpool.scheduler.actions import Action, Bound, Prefetch, Replicate
from moonpool.scheduler.admission.make import make_admission
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.links import Links
from moonpool.scheduler.policies.make import make_policy
from moonpool.scheduler.policy import Asked, Choice

BLOCK_S = BLOCK * 1e-3  # computing one block


def apart(prefills: int = 2, *, block_fetch_s: float = 0.0, **numbers: float) -> Cluster:
    """Prefill workers on nodes a, b, ... of their own, one decode worker; all have been measured."""
    cluster = Cluster()
    cluster.conductor = Conductor(policy=make_policy("moonpool", numbers))
    if block_fetch_s:
        cluster.conductor.links = Links(bytes_per_s=LAYOUT.block_bytes / block_fetch_s)
    for i in range(prefills):
        cluster.join(f"store-{'abcdefg'[i]}", Role.STORE, "abcdefg"[i])
        cluster.join(f"prefill-{i}", Role.PREFILL, "abcdefg"[i])
        cluster.teach(f"prefill-{i}")
    cluster.join("store-z", Role.STORE, "z")
    cluster.join("decode-0", Role.DECODE, "z")
    cluster.teach("decode-0")
    return cluster


def ask(cluster: Cluster, request: str, tokens: int, prompt: tuple[bytes, ...] = (), priority: int = 0) -> Placement | Later:
    answer = cluster.conductor.place(PlaceRequest(request, 1, prompt, tokens, 32, priority=priority), cluster.now)
    assert isinstance(answer, Placement | Later)
    return answer


def busy(cluster: Cluster, worker: str, tokens: int) -> None:
    cluster.report(worker, [LiveAttempt(f"at-{worker}", 1, tokens, tokens)] if tokens else [])


def observed(cluster: Cluster, worker: str) -> list[Action]:
    """What follows from a report of ``worker`` that it is idle."""
    return cluster.conductor.observe(WorkerReport(MemberId(worker), Incarnation(1), (), 1_000, 1_000), cluster.now)


def due(cluster: Cluster) -> list[tuple[str, MemberId]]:
    """(request, prefill worker) of those who are answered now."""
    out = []
    for action in cluster.conductor.due(cluster.now):
        if isinstance(action, Bound) and isinstance(action.answer, Placement):
            out.append((action.request, action.answer.prefill.id))
    return out


def wait_and_bind(cluster: Cluster) -> list[tuple[str, MemberId]]:
    """Moves the clock to when the conductor wants to be called, until somebody is answered."""
    while True:
        at = cluster.conductor.next_at()
        assert at is not None
        cluster.now = max(cluster.now, at)
        if answered := due(cluster):
            return answered


def test_an_arrival_takes_the_idle_worker_with_the_longest_match_of_its_own() -> None:
    cluster = apart(3)
    prompt = keys(1, 8)
    for node, has in zip("abc", (2, 8, 5), strict=True):
        cluster.stored(node, prompt[:has], store=f"store-{node}")
    answer = ask(cluster, "r", 8 * BLOCK + 10, prompt)
    assert isinstance(answer, Placement)
    assert answer.prefill.id == "prefill-1"


def test_a_request_waits_in_the_conductor_while_everybody_is_busy_and_the_shortest_goes_first() -> None:
    cluster = apart(1)
    busy(cluster, "prefill-0", 1_000)
    for name, tokens in (("long", 900), ("short", 100), ("middle", 400)):
        answer = ask(cluster, name, tokens)
        assert isinstance(answer, Later)
    assert due(cluster) == []
    assert [wait_and_bind(cluster) for _ in range(3)] == [[(name, "prefill-0")] for name in ("short", "middle", "long")]
    assert cluster.conductor.next_at() is None


def test_a_predicted_wait_counts_those_who_go_before() -> None:
    cluster = apart(1)
    busy(cluster, "prefill-0", 1_000)
    ask(cluster, "short", 100)
    answer = ask(cluster, "long", 900)
    assert isinstance(answer, Later)
    expected = prefill_seconds(1_000) + prefill_seconds(100) + prefill_seconds(900)
    assert answer.predicted_ttft_ms == pytest.approx(1e3 * expected, rel=0.03)


def test_first_come_first_served_where_size_counts_for_nothing() -> None:
    cluster = apart(1, size_weight=0.0)
    busy(cluster, "prefill-0", 1_000)
    for name, tokens in (("long", 900), ("short", 100)):
        ask(cluster, name, tokens)
        cluster.now += 0.01
    assert [wait_and_bind(cluster) for _ in range(2)] == [[("long", "prefill-0")], [("short", "prefill-0")]]


def test_urgent_requests_pass_the_others() -> None:
    cluster = apart(1)
    busy(cluster, "prefill-0", 1_000)
    ask(cluster, "short", 10)
    ask(cluster, "urgent", 900, priority=1)
    assert [wait_and_bind(cluster) for _ in range(2)] == [[("urgent", "prefill-0")], [("short", "prefill-0")]]


def test_a_big_prompt_among_endless_small_ones_starts_within_a_bounded_time() -> None:
    """Small ones pass while it waits, but only those that came soon enough after it."""
    age = 0.5
    cluster = apart(1, age=age)
    busy(cluster, "prefill-0", 500)
    big, small = 4_000, 100
    begun = cluster.now
    assert isinstance(ask(cluster, "big", big), Later)
    passed = []
    for i in range(400):
        ask(cluster, f"small{i}", small)
        for request, _ in wait_and_bind(cluster):
            passed.append(request)
        if "big" in passed:
            break
    assert len(passed) > 20, "small ones start while the big one waits"
    assert cluster.now - begun <= (prefill_seconds(big) - prefill_seconds(small)) / age + 2.0


def test_who_has_waited_for_as_long_as_the_cap_is_passed_no_more() -> None:
    cluster = apart(1, age=0.0, wait_cap_s=3.0)
    busy(cluster, "prefill-0", 500)
    begun = cluster.now
    ask(cluster, "big", 4_000)
    for i in range(400):
        ask(cluster, f"small{i}", 100)
        if ("big", "prefill-0") in wait_and_bind(cluster):
            break
    assert 3.0 <= cluster.now - begun <= 3.0 + prefill_seconds(100)


@settings(max_examples=25, deadline=None)
@given(
    works=st.lists(st.integers(20, 3_000), min_size=1, max_size=25),
    gaps=st.lists(st.floats(0.0, 1.0), min_size=25, max_size=25),
    age=st.sampled_from([0.1, 0.5, 2.0]),
)
def test_ageing_bounds_by_how_much_later_ones_may_pass(works: list[int], gaps: list[float], age: float) -> None:
    """Whoever goes before an earlier one was shorter by more than what the earlier one had aged by then."""
    cluster = apart(1, age=age, wait_cap_s=1e6)
    busy(cluster, "prefill-0", 4_000)
    arrived: dict[str, float] = {}
    order: list[str] = []
    for i, tokens in enumerate(works):
        arrived[f"r{i}"] = cluster.now
        ask(cluster, f"r{i}", tokens)
        cluster.now += gaps[i] / 25
    while len(order) < len(works):
        order += [request for request, _ in wait_and_bind(cluster)]
    for at, later in enumerate(order):
        for earlier in order[at + 1 :]:
            i, j = int(later[1:]), int(earlier[1:])
            if j < i:
                gained = prefill_seconds(works[j]) - prefill_seconds(works[i])
                assert gained >= age * (arrived[later] - arrived[earlier]) - 1e-2 * prefill_seconds(max(works))


def test_a_request_waits_for_the_busy_worker_that_has_its_prefix_where_that_is_sooner() -> None:
    """Over a slow link; the free worker takes the next one instead."""
    cluster = apart(2, block_fetch_s=10 * BLOCK_S)
    prompt = keys(1, 100)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 400)
    assert isinstance(ask(cluster, "warm", 100 * BLOCK + 10, prompt), Later)
    other = ask(cluster, "cold", 100)
    assert isinstance(other, Placement)
    assert other.prefill.id == "prefill-0"
    assert wait_and_bind(cluster) == [("warm", "prefill-1")]


def test_the_free_worker_computes_where_the_holder_is_busy_for_longer_than_that() -> None:
    cluster = apart(2, block_fetch_s=10 * BLOCK_S)
    prompt = keys(1, 100)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 3_000)
    answer = ask(cluster, "warm", 100 * BLOCK + 10, prompt)
    assert isinstance(answer, Placement)
    assert answer.prefill.id == "prefill-0"


def test_compute_from_the_front_meets_the_fetch_from_the_back_and_the_rest_is_moved() -> None:
    """A link as fast as computing: half of the blocks each way."""
    cluster = apart(2, block_fetch_s=BLOCK_S)
    prompt = keys(1, 64)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 4_000)
    answer = ask(cluster, "r", 64 * BLOCK + 1, prompt)
    assert isinstance(answer, Placement)
    assert answer.prefill.id == "prefill-0"
    front, tail = answer.segments
    assert (front.source, tail.source, tail.node, tail.move) == (Source.RECOMPUTE, Source.FETCH, NodeId("b"), True)
    assert front.count == pytest.approx(32, abs=4)
    assert answer.predicted_ttft_ms == pytest.approx(1e3 * 32 * BLOCK_S, rel=0.2)


def test_what_a_fast_link_brings_is_fetched_whole() -> None:
    cluster = apart(2, block_fetch_s=BLOCK_S / 100)
    prompt = keys(1, 64)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 4_000)
    answer = ask(cluster, "r", 70 * BLOCK, prompt)
    assert isinstance(answer, Placement)
    assert answer.segments == (Segment(0, 64, Source.FETCH, NodeId("b"), move=True),)


def test_a_copy_is_made_where_moving_is_switched_off() -> None:
    cluster = apart(2, block_fetch_s=BLOCK_S / 100, move=0.0)
    prompt = keys(1, 64)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 4_000)
    answer = ask(cluster, "r", 70 * BLOCK, prompt)
    assert isinstance(answer, Placement)
    assert not answer.segments[0].move


def test_equal_prompts_wait_for_the_one_that_computes_their_prefix_rather_than_compute_it_thrice() -> None:
    cluster = apart(3)
    prompt = keys(1, 100)
    first = ask(cluster, "r0", 100 * BLOCK + 10, prompt)
    assert isinstance(first, Placement)
    cluster.now += 0.5
    assert isinstance(ask(cluster, "r1", 100 * BLOCK + 20, prompt), Later)
    assert isinstance(ask(cluster, "r2", 100 * BLOCK + 30, prompt), Later)
    cluster.now += prefill_seconds(100 * BLOCK + 10) - 0.5
    cluster.stored(first.prefill.node, prompt, store=f"store-{first.prefill.node}")
    assert len({worker for _, worker in due(cluster)}) == 2, "one where it was computed, one by a fetch"


def test_an_equal_prompt_does_not_wait_where_computing_it_again_is_as_soon() -> None:
    cluster = apart(2)
    prompt = keys(1, 100)
    went = {
        answer.prefill.id for i in range(2) if isinstance(answer := ask(cluster, f"r{i}", 100 * BLOCK + 10, prompt), Placement)
    }
    assert went == {"prefill-0", "prefill-1"}


def test_a_burst_of_equal_prompts_that_share_little_spreads_over_all_workers() -> None:
    cluster = apart(4)
    shared = keys(1, 2)
    cluster.stored("a", shared, store="store-a")
    went = []
    for i in range(4):
        answer = ask(cluster, f"r{i}", 50 * BLOCK, shared)
        assert isinstance(answer, Placement)
        went.append(answer.prefill.id)
    assert sorted(went) == [f"prefill-{i}" for i in range(4)], "what was booked counts at once"


def test_the_prediction_follows_what_a_worker_evicts() -> None:
    """A pool of 64 blocks takes three prefixes of 40 in turn: each pushes out the one before."""
    cluster = apart(1)
    life, number = Incarnation(1), 1

    def told(change: BlockChange, what: tuple[bytes, ...]) -> None:
        nonlocal number
        event = BlockEvent(change, Tier.G2, what)
        cluster.conductor.observe(EventBatch("a", life, number, (event,)), cluster.now)
        number += 1

    prefixes = [keys(i, 40) for i in range(3)]
    for turn in range(6):
        old, new = prefixes[(turn - 1) % 3], prefixes[turn % 3]
        if turn:
            told(BlockChange.REMOVED, old[24:])  # deepest first, until the new one fits
            told(BlockChange.REMOVED, old[:24])
        told(BlockChange.STORED, new)
        for i, prefix in enumerate(prefixes):
            answer = ask(cluster, f"r{turn}.{i}", 41 * BLOCK, prefix)
            assert isinstance(answer, Placement)
            reused = sum(segment.count for segment in answer.segments if segment.source is Source.FETCH)
            assert reused == (40 if i == turn % 3 else 0)
            cluster.finish(f"r{turn}.{i}", ttft_ms=1.0, cached=reused * BLOCK)
            cluster.report("prefill-0")
            cluster.now += 10.0
    assert cluster.gauge("cached_tokens_predicted") == cluster.gauge("cached_tokens_actual") == 6 * 40 * BLOCK


def test_only_whole_blocks_count_as_held() -> None:
    """Three quarters of a block in common are no block in common: their keys differ."""
    cluster = apart(1)
    cluster.stored("a", keys(1, 1), store="store-a")
    answer = ask(cluster, "r", BLOCK + 10, keys(2, 1))
    assert isinstance(answer, Placement)
    assert answer.segments == (Segment(0, 1, Source.RECOMPUTE),)
    told = cluster.conductor.explain("r")
    assert told is not None
    assert told["decisions"][0]["predicted"]["cached_tokens"] == 0


def test_a_request_that_nobody_waits_for_any_more_is_forgotten() -> None:
    cluster = apart(1)
    busy(cluster, "prefill-0", 1_000)
    ask(cluster, "r", 100)
    assert cluster.gauge("waiting") == 1
    cluster.conductor.withdraw("r", cluster.now)
    assert cluster.gauge("waiting") == 0
    assert cluster.conductor.next_at() is None


def test_a_prefix_that_many_prompts_share_just_now_gets_another_copy_as_often_as_their_number_doubles() -> None:
    cluster = apart(7, hot=2.0, patience=0.0)
    shared = keys(1, 20)
    cluster.stored("g", shared, store="store-g")
    copies = []
    for i in range(6):
        answer = ask(cluster, f"r{i}", 400 * BLOCK, (*shared, *keys(10 + i, 20)))
        assert isinstance(answer, Placement)
        fetched = [segment for segment in answer.segments if segment.node not in (None, answer.prefill.node)]
        assert all(segment.move == (i < 2) for segment in fetched), "hot copies stay where they are"
        copies.append([action for action in cluster.conductor.take_actions() if isinstance(action, Replicate)])
    assert [len(made) for made in copies] == [0, 0, 1, 0, 1, 0], "when two and when four others share it"
    (copy,) = copies[2]
    assert (copy.source, copy.keys) == (NodeId("g"), shared)
    assert copy.target != copy.source


def test_what_lies_on_an_ssd_comes_into_memory_while_its_request_waits() -> None:
    cluster = apart(1)
    prompt = keys(1, 20)
    cluster.stored("a", prompt[:5], store="store-a")
    cluster.stored("a", prompt[5:], store="store-a", tier=Tier.G3)
    busy(cluster, "prefill-0", 1_000)
    assert isinstance(ask(cluster, "r", 21 * BLOCK, prompt), Later)
    assert cluster.conductor.take_actions() == [Prefetch(NodeId("a"), prompt)]
    assert isinstance(ask(cluster, "short", 6 * BLOCK, prompt[:5]), Later)
    assert cluster.conductor.take_actions() == []


def test_nobody_waits_for_a_prefix_whose_computing_has_ended_without_it() -> None:
    cluster = apart(2)
    prompt = keys(1, 100)
    assert isinstance(ask(cluster, "r0", 100 * BLOCK + 10, prompt), Placement)
    cluster.now += 0.8
    assert isinstance(ask(cluster, "r1", 100 * BLOCK + 20, prompt), Later)
    answers = [action.answer for action in observed(cluster, "prefill-0") if isinstance(action, Bound)]
    assert [type(answer) for answer in answers] == [Placement]
    assert cluster.gauge("waiting") == 0


def test_a_worker_that_leaves_takes_no_waiting_request_with_it() -> None:
    cluster = apart(2, block_fetch_s=10 * BLOCK_S)
    prompt = keys(1, 100)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 400)
    assert isinstance(ask(cluster, "warm", 100 * BLOCK + 10, prompt), Later)
    change = MemberChange(cluster.members["prefill-1"], Liveness.GONE)
    (answered,) = [a.answer for a in cluster.conductor.observe(change, cluster.now) if isinstance(a, Bound)]
    assert isinstance(answered, Placement)
    assert answered.prefill.id == "prefill-0"


def test_a_hand_over_takes_its_share_of_the_links_until_it_is_through_or_its_request_is_over() -> None:
    cluster = apart(2, block_fetch_s=BLOCK_S)
    answer = ask(cluster, "r", 64 * BLOCK, keys(1, 64))
    assert isinstance(answer, Placement)
    links, size = cluster.conductor.links, LAYOUT.block_bytes

    def seconds() -> float:
        links.advance(cluster.now)
        return float(links.seconds(answer.prefill.node, size, (NodeId("b" if answer.prefill.node == "a" else "a"),))[0])

    assert seconds() == pytest.approx(2 * BLOCK_S, rel=0.01), "a block of each in turn"
    cluster.finish("r")
    assert seconds() == pytest.approx(BLOCK_S, rel=0.01)


def test_only_so_many_are_asked_about_in_vain_for_one_free_worker() -> None:
    """All have their prefix at the busy worker, over a slow link; a long queue must not make each event slow."""
    cluster = apart(2, block_fetch_s=10 * BLOCK_S)
    prompt = keys(1, 100)
    cluster.stored("b", prompt, store="store-b")
    busy(cluster, "prefill-1", 400)
    for i in range(60):
        assert isinstance(ask(cluster, f"r{i}", 100 * BLOCK + 10, prompt), Later)
    asked = 0
    choose = cluster.conductor.policy.choose

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(policy, name)

        def choose(self, what: Asked) -> Choice | None:
            nonlocal asked
            asked += 1
            return choose(what)

    policy = cluster.conductor.policy
    cluster.conductor._late._policy = Counted()  # type: ignore[assignment]
    assert due(cluster) == []
    assert 0 < asked <= 16


def crowded(**numbers: float) -> Cluster:
    """Steps of the decode worker take 60 ms."""
    cluster = apart(**numbers)
    cluster.conductor.admission = make_admission("none", {})
    cluster.report("decode-0", [LiveAttempt(f"d{i}", 1, 10, 1_000) for i in range(40)])
    return cluster


def test_a_prompt_is_held_back_until_somebody_can_decode_it_inside_its_target() -> None:
    cluster = crowded()
    wanted = PlaceRequest("r", 1, (), 100, 32, Targets(10_000.0, 50.0))
    assert isinstance(cluster.conductor.place(wanted, cluster.now), Later)
    assert isinstance(ask(cluster, "carries no targets", 100), Placement)
    cluster.now += 1.0
    assert not due(cluster)
    cluster.report("decode-0", [LiveAttempt(f"d{i}", 1, 10, 1_000) for i in range(20)])
    cluster.now += 0.01
    assert not due(cluster), "bound by the report itself"
    assert cluster.gauge("waiting") == 0
    assert cluster.gauge("bookings") == 2


def test_nobody_is_held_back_for_longer_than_its_part_of_the_target_for_the_first_token() -> None:
    cluster = crowded(held=0.5)
    wanted = PlaceRequest("r", 1, (), 100, 32, Targets(10_000.0, 50.0))
    assert isinstance(cluster.conductor.place(wanted, cluster.now), Later)
    cluster.now += 4.9
    assert not due(cluster)
    cluster.now += 0.2
    assert [request for request, _ in due(cluster)] == ["r"]


def test_nobody_is_held_back_where_room_is_not_asked_for() -> None:
    cluster = crowded(room=0.0)
    wanted = PlaceRequest("r", 1, (), 100, 32, Targets(10_000.0, 50.0))
    assert isinstance(cluster.conductor.place(wanted, cluster.now), Placement)


@pytest.mark.parametrize(("role", "before_s"), [(Role.BOTH, 0.2), (Role.PREFILL, 0.05)])
def test_a_worker_is_given_who_waits_a_little_before_it_is_free_and_more_so_where_it_computes_prompts_together(
    role: Role, before_s: float
) -> None:
    cluster = Cluster(Conductor(policy=make_policy("moonpool", {"lookahead_s": 0.05, "lookahead_both_s": 0.2})))
    for name in ("a", "z"):
        cluster.join(f"store-{name}", Role.STORE, name)
    cluster.join("worker", role, "a")
    cluster.join("decode-0", Role.DECODE, "z")
    cluster.teach("worker", "decode-0")
    cluster.report("worker", [LiveAttempt("other", 1, 1_000, 1_000, prompt_left=1_000)])
    free_at = float(cluster.conductor._view.board.busy_until[cluster.conductor._view.board.row[MemberId("worker")]])
    assert isinstance(ask(cluster, "r0", 100), Later)
    assert wait_and_bind(cluster) == [("r0", "worker")]
    assert free_at - cluster.now == pytest.approx(before_s, abs=1e-6)
