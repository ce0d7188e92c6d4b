"""Several prefill workers on one long prompt: who helps, what is booked for it, and when that ends."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.cluster_of_members import BLOCK, LAYOUT, Cluster, keys, prefill_seconds

from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import LiveAttempt, Liveness
from moonpool.core.placement import Later, Placement, PlaceRequest, Source
from moonpool.scheduler.actions import Bound
from moonpool.scheduler.conductor import Conductor
from moonpool.scheduler.links import Links
from moonpool.scheduler.policies.make import make_policy

GAUGES = ("bookings", "booked_prefill_seconds", "booked_context_tokens", "attempts_reported")
LONG = 4_000  # tokens: four seconds at one worker
MANY_LAYERS = replace(LAYOUT, layers=40)


def grouping(prefills: int = 3, *, link: Links | None = None, **numbers: float) -> Cluster:
    """Prefill workers on nodes a, b, ... of their own that may share prompts of more than a second, one decode worker."""
    cluster = Cluster(layout=MANY_LAYERS)
    settings = {"group": 8.0, "group_settle_s": 0.0, **numbers}
    cluster.conductor = Conductor(policy=make_policy("moonpool", settings))
    if link is not None:
        cluster.conductor.links = link
    for i in range(prefills):
        cluster.join(f"store-{'abcdefg'[i]}", Role.STORE, "abcdefg"[i])
        cluster.join(f"prefill-{i}", Role.PREFILL, "abcdefg"[i])
        cluster.teach(f"prefill-{i}")
    cluster.join("store-z", Role.STORE, "z")
    cluster.join("decode-0", Role.DECODE, "z")
    cluster.teach("decode-0")
    return cluster


def workers(placed: Placement) -> list[str]:
    return [*(helper.worker.id for helper in placed.helpers), placed.prefill.id]


def busy(cluster: Cluster, worker: str, tokens: int) -> None:
    cluster.report(worker, [LiveAttempt(f"at-{worker}", 1, tokens, tokens, running=True)])


def test_idle_workers_share_a_long_prompt_and_its_first_token_comes_sooner_by_as_much() -> None:
    cluster = grouping(4)
    placed = cluster.placed("r", LONG)
    assert len(set(workers(placed))) == 4
    ends = [helper.until for helper in placed.helpers]
    assert ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] * BLOCK < LONG
    alone = grouping(1).placed("r", LONG)
    assert not alone.helpers
    lag = 1 + 3 / MANY_LAYERS.layers
    assert placed.predicted_ttft_ms == pytest.approx(alone.predicted_ttft_ms / 4 * lag, rel=0.1)


def test_short_prompts_are_not_shared_nor_are_any_unless_asked_for() -> None:
    assert not grouping(4).placed("r", 800).helpers
    assert not grouping(4, group=0.0).placed("r", LONG).helpers
    assert len(grouping(4, group=2.0).placed("r", LONG).helpers) == 1


def test_a_helper_more_must_bring_the_first_token_nearer() -> None:
    assert len(grouping(6).placed("r", LONG).helpers) > len(grouping(6, group_gain_s=1.2).placed("r", LONG).helpers) >= 1


def test_a_slow_link_between_workers_leaves_the_prompt_to_one_of_them() -> None:
    token_bytes = MANY_LAYERS.block_bytes / BLOCK
    assert grouping(3, link=Links(bytes_per_s=token_bytes / 1e-6)).placed("r", LONG).helpers
    assert not grouping(3, link=Links(bytes_per_s=token_bytes / 2e-2)).placed("r", LONG).helpers


def test_who_has_the_prefix_begins_and_the_others_get_it_from_there() -> None:
    cluster = grouping(3)
    prompt = keys(1, LONG // BLOCK)
    cluster.stored("b", prompt[:40], store="store-b")
    placed = cluster.placed("r", LONG, prompt=prompt)
    assert workers(placed)[0] == "prefill-1"
    first, rest = placed.segments
    assert (first.source, first.node, first.count) == (Source.FETCH, "b", 40)
    assert rest.source is Source.RECOMPUTE and placed.helpers[0].until > 40


def test_of_workers_that_take_turns_with_the_cores_of_a_host_one_is_enough() -> None:
    cluster = grouping(5)
    for name, cores in (("prefill-0", "x"), ("prefill-1", "x"), ("prefill-2", "y"), ("prefill-3", "y"), ("prefill-4", "")):
        cluster.members[name] = replace(cluster.members[name], details={"turns": cores})
        cluster.change(name)
    busy(cluster, "prefill-3", 50)
    group = workers(cluster.placed("r", LONG))
    assert len(group) == 3 and {"prefill-2", "prefill-4"} < set(group)
    for name in ("prefill-3", "prefill-4"):
        busy(cluster, name, 3_000)
    cluster.finish("r")
    assert len(workers(cluster.placed("next", LONG))) == 2


def test_failed_and_busy_workers_do_not_help_and_who_is_soon_free_gets_less() -> None:
    cluster = grouping(4)
    placed = cluster.placed("r", LONG, attempt=2, exclude=["prefill-2"])
    assert "prefill-2" not in workers(placed) and len(placed.helpers) == 2
    cluster.finish("r", attempt=2)
    busy(cluster, "prefill-0", 3_000)
    busy(cluster, "prefill-3", 400)
    placed = cluster.placed("r", LONG)
    assert "prefill-0" not in workers(placed)
    assert workers(placed)[-1] == "prefill-3"
    ends = [0, *(helper.until * BLOCK for helper in placed.helpers), LONG]
    spans = [end - begin for begin, end in pairwise(ends)]
    assert spans[-1] < spans[0] - 200


def test_those_who_wait_and_go_before_it_get_workers_first() -> None:
    cluster = grouping(3, group_settle_s=0.05)
    for i in range(3):
        busy(cluster, f"prefill-{i}", 200)
    for name, tokens in (("long", LONG), ("short", 300), ("middle", 600)):
        assert isinstance(cluster.conductor.place(PlaceRequest(name, 1, (), tokens, 32), cluster.now), Later)
    answers: dict[str, Placement] = {}
    while len(answers) < 3:
        at = cluster.conductor.next_at()
        assert at is not None
        cluster.now = max(cluster.now, at)
        for action in cluster.conductor.due(cluster.now):
            if isinstance(action, Bound) and isinstance(action.answer, Placement):
                answers[action.request] = action.answer
    assert list(answers) == ["short", "middle", "long"]
    assert not answers["short"].helpers and not answers["middle"].helpers


def test_a_worker_is_left_for_everybody_who_waits_and_goes_before() -> None:
    helped = []
    for waits in (False, True):
        cluster = grouping(3, group_least_s=3.0)
        prompt = keys(1, 2_000 // BLOCK)
        cluster.placed("first", 2_000, prompt=prompt)
        cluster.now += 1.5
        if waits:
            answer = cluster.conductor.place(PlaceRequest("same", 1, prompt, 2_020, 32), cluster.now)
            assert isinstance(answer, Later), "what it needs is about to be computed"
        helped.append(len(cluster.placed("long", LONG).helpers))
    assert helped[0] == helped[1] + 1


def test_a_prompt_that_may_be_shared_waits_a_moment_for_what_comes_with_it() -> None:
    cluster = grouping(2, group_settle_s=0.05)
    answer = cluster.conductor.place(PlaceRequest("long", 1, (), LONG, 32), cluster.now)
    assert isinstance(answer, Later)
    assert not cluster.placed("short", 300).helpers, "comes with it and finds an idle worker"
    at = cluster.conductor.next_at()
    assert at is not None and at == pytest.approx(cluster.now + 0.05)
    cluster.now = at
    (bound,) = cluster.conductor.due(cluster.now)
    assert isinstance(bound, Bound) and isinstance(bound.answer, Placement)
    assert cluster.conductor.numbers(cluster.now)["waiting"] == 0


def test_every_worker_of_a_group_is_booked_until_it_has_reported_its_span() -> None:
    cluster = grouping(3)
    placed = cluster.placed("r", LONG)
    assert cluster.gauge("booked_prefill_seconds") >= prefill_seconds(LONG)
    later = cluster.conductor.place(PlaceRequest("next", 1, (), 100, 32), cluster.now)
    assert isinstance(later, Later), "all of them are busy"
    cluster.conductor.withdraw("next", cluster.now)
    begin = 0
    for name, end in zip(workers(placed), [*(helper.until * BLOCK for helper in placed.helpers), LONG], strict=True):
        cluster.report(name, [LiveAttempt("r", 1, end, end - begin, running=True)])
        begin = end
    assert cluster.gauge("booked_prefill_seconds") == 0
    probe = cluster.conductor.place(PlaceRequest("next", 1, (), 100, 32), cluster.now)
    assert isinstance(probe, Later)
    assert probe.predicted_ttft_ms == pytest.approx(placed.predicted_ttft_ms + 100 + 10, rel=0.1)
    cluster.conductor.withdraw("next", cluster.now)
    for name in workers(placed):
        cluster.report(name)
    assert isinstance(cluster.conductor.place(PlaceRequest("next", 1, (), 100, 32), cluster.now), Placement)


def test_a_span_that_waits_is_counted_by_its_own_length() -> None:
    cluster = grouping(2)
    placed = cluster.placed("r", LONG)
    helper, last = placed.helpers[0], placed.prefill
    cluster.report(last.id, [LiveAttempt("r", 1, LONG, LONG)])  # whole: it has not begun, and cannot know
    cluster.report(helper.worker.id, [LiveAttempt("r", 1, helper.until * BLOCK, helper.until * BLOCK)])
    probe = cluster.conductor.place(PlaceRequest("next", 1, (), 100, 32), cluster.now)
    assert isinstance(probe, Later)
    assert probe.predicted_ttft_ms < 0.8e3 * prefill_seconds(LONG)


def test_helpers_stay_booked_until_the_last_worker_of_the_group_may_have_asked_them() -> None:
    cluster = grouping(3)
    busy(cluster, "prefill-2", 500)
    placed = cluster.placed("r", LONG)
    assert workers(placed)[-1] == "prefill-2"
    cluster.now += 0.4
    for name in workers(placed)[:-1]:
        cluster.report(name)
    assert isinstance(cluster.conductor.place(PlaceRequest("next", 1, (), 100, 32), cluster.now), Later)
    cluster.conductor.withdraw("next", cluster.now)
    cluster.now += 0.5
    cluster.report(workers(placed)[0])
    assert isinstance(cluster.conductor.place(PlaceRequest("next", 1, (), 100, 32), cluster.now), Placement), "it never came"


@pytest.mark.parametrize("how", ["finished", "withdrawn", "expired", "helper lost", "next attempt"])
def test_nothing_of_a_group_stays_booked(how: str) -> None:
    cluster = grouping(3)
    placed = cluster.placed("r", LONG)
    flows = len(cluster.conductor.links)
    match how:
        case "finished":
            cluster.finish("r")
        case "withdrawn":
            cluster.conductor.withdraw("r", cluster.now)
        case "expired":
            cluster.now += 121.0
        case "helper lost":
            cluster.change(placed.helpers[0].worker.id, Liveness.GONE)
        case "next attempt":
            cluster.placed("r", 100, attempt=2)
            cluster.finish("r", attempt=2)
    assert all(cluster.gauge(name) == 0 for name in GAUGES)
    assert flows and (how in ("expired", "helper lost") or not len(cluster.conductor.links))
    again = cluster.placed("again", 300)
    assert again.predicted_ttft_ms == pytest.approx(1e3 * prefill_seconds(300), rel=0.05)


def test_a_second_conductor_books_the_same_group() -> None:
    one, other = grouping(3), grouping(3)
    placed = one.placed("r", LONG)
    asked = PlaceRequest("r", 1, (), LONG, 32)
    found = other.conductor.assume(asked, placed, other.now)
    assert found is not None
    assert other.gauge("booked_prefill_seconds") == pytest.approx(one.gauge("booked_prefill_seconds"))
    assert found.option.ttft.likely * 1e3 == pytest.approx(placed.predicted_ttft_ms)
    stranger = replace(placed, helpers=(replace(placed.helpers[0], worker=replace(placed.prefill, id=MemberId("x"))),))
    assert other.conductor.assume(asked, stranger, other.now) is None


def test_explain_names_who_computes_what_and_counters_count_groups() -> None:
    cluster = grouping(3)
    placed = cluster.placed("r", LONG)
    told = cluster.conductor.explain("r")
    assert told is not None
    shares = told["decisions"][0]["group"]
    assert [share["worker"] for share in shares] == workers(placed)
    assert shares[0]["begin"] == 0 and shares[-1]["end"] == LONG
    assert all(one["end"] == other["begin"] for one, other in pairwise(shares))
    assert shares[-1]["ends_ms"] == pytest.approx(placed.predicted_ttft_ms, rel=1e-3)
    assert told["decisions"][0]["predicted"]["work_ms"] >= 1e3 * prefill_seconds(LONG)
    assert (cluster.gauge("prefill_groups"), cluster.gauge("prefill_helpers")) == (1, 2)
