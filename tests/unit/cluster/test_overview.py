"""The picture of a cluster from what its processes said at two moments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moonpool.cluster.overview.picture import Look, picture
from moonpool.cluster.overview.told import Recent, landed_from, recent_of
from moonpool.cluster.survey import Answer
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange


def said(name: str, role: Role, node: str, words: dict[str, str] | None = None, **numbers: float) -> Answer:
    member = Member(MemberId(name), role, NodeId(node), Incarnation(1), "127.0.0.1:1", 1, model="tiny")
    return Answer(MemberChange(member, Liveness.LIVE), numbers, words or {})


def again(answer: Answer, life: int = 1, **numbers: float) -> Answer:
    member = replace(answer.change.member, incarnation=Incarnation(life))
    return replace(answer, change=replace(answer.change, member=member), numbers={**answer.numbers, **numbers})


STORE = said(
    "store-b",
    Role.STORE,
    "b",
    {"landed_from": "prefill-0/tcp=1000 store-a/ucx=500 stranger/tcp=7"},
    pool_bytes=1000.0,
    pool_free_bytes=250.0,
    slots_sealed=3.0,
    slots_fenced=1.0,
    bytes_landed_tcp=1007.0,
    bytes_landed_ucx=500.0,
)
PREFILL = said(
    "prefill-0", Role.PREFILL, "a", prefix_tokens_computed_count=100.0, prefix_tokens_device_count=300.0, pages_total=8.0
)
DECODE = said("decode-0", Role.DECODE, "b", tokens_count=50.0, requests_running=2.0)


def test_one_look_gives_states_and_totals_but_no_rates() -> None:
    seen = picture(None, Look(5.0, (STORE, PREFILL, DECODE)))
    assert (seen.seconds, seen.output_rate, seen.prompt_rate) == (0.0, None, None)
    assert seen.pools[0].used_share == 0.75 and seen.pools[0].slots["fenced"] == 1
    assert {one.name: one.tokens for one in seen.sources} == {"device": 300, "pool": 0, "remote": 0, "computed": 100}
    assert seen.hit_share == 0.75
    assert [(one.carrier, one.bytes, one.rate) for one in seen.carriers] == [("tcp", 1007, None), ("ucx", 500, None)]


def test_every_model_has_a_leading_conductor_of_its_own() -> None:
    def conductor(name: str, model: str, term: int) -> Answer:
        answer = said(name, Role.CONDUCTOR, "a", waiting=0.0)
        return replace(answer, change=replace(answer.change, member=replace(answer.change.member, model=model, term=term)))

    three = (conductor("c-0", "one", 1), conductor("c-1", "two", 3), conductor("c-2", "two", 0))
    assert [(one.id, one.leads) for one in picture(None, Look(5.0, three)).conductors] == [("c-0", 1), ("c-1", 3), ("c-2", 0)]


def test_rates_are_differences_over_the_time_between() -> None:
    then = Look(10.0, (STORE, PREFILL, DECODE))
    store = again(STORE, bytes_landed_tcp=3007.0)
    store = replace(store, words={"landed_from": "prefill-0/tcp=3000 store-a/ucx=500 stranger/tcp=7"})
    now = Look(12.0, (store, again(PREFILL, prefix_tokens_computed_count=160.0), again(DECODE, tokens_count=90.0)))
    seen = picture(then, now)
    assert (seen.output_rate, seen.prompt_rate) == (20.0, 30.0)
    assert [one.speed for one in seen.workers] == [30.0, 20.0]
    assert {one.carrier: one.rate for one in seen.carriers} == {"tcp": 1000.0, "ucx": 0.0}
    links = {(one.source, one.target, one.carrier): one.rate for one in seen.links}
    assert links["a", "b", "tcp"] == 1000.0 and links["", "b", "tcp"] == 0.0
    assert [(one.name, one.tokens) for one in seen.sources] == [("device", 0), ("pool", 0), ("remote", 0), ("computed", 60)]


def test_a_process_that_began_a_new_life_counts_from_zero_and_a_new_one_has_no_rate_yet() -> None:
    then = Look(0.0, (DECODE,))
    newcomer = said("decode-1", Role.DECODE, "c", tokens_count=400.0)
    seen = picture(then, Look(2.0, (again(DECODE, life=2, tokens_count=60.0), newcomer)))
    assert [one.speed for one in seen.workers] == [30.0, None]
    assert seen.output_rate == 30.0
    assert [one.speed for one in picture(then, Look(2.0, (again(DECODE, tokens_count=10.0),))).workers] == [5.0]


def test_who_is_away_keeps_a_line_with_the_reason() -> None:
    gone = replace(DECODE, change=replace(DECODE.change, liveness=Liveness.GONE, proof="pidfd"), numbers={}, words={})
    silent = replace(PREFILL, numbers={}, trouble="DEADLINE_EXCEEDED: late")
    seen = picture(Look(0.0, (DECODE, PREFILL)), Look(1.0, (gone, silent)))
    assert [(one.state, one.ready, one.note) for one in seen.members] == [
        ("gone", False, "pidfd"),
        ("live", True, "DEADLINE_EXCEEDED: late"),
    ]
    assert (seen.workers, seen.live) == ((), 1)


@pytest.mark.parametrize(
    "word", ["", "x", "[]", "null", '{"ttft_ms": 3}', '{"refused": 7}', '{"answers": "many"}', '{"ttft_ms": [1]}']
)
def test_words_that_cannot_be_read_say_nothing(word: str) -> None:
    assert recent_of({"recent": word}) == Recent()
    assert landed_from({"landed_from": "a/b=-1 /b=2 a/=3 a=4 a/b=x = /"}) == {}


def test_words_are_read_as_they_were_written() -> None:
    told = Recent(60.0, 3, (1.5, 9.0), None, {"overloaded": 2})
    assert recent_of({"recent": told.word()}) == told


def test_refusals_of_all_gateways_are_added_up() -> None:
    def gateway(name: str, **refused: int) -> Answer:
        return said(name, Role.GATEWAY, "a", {"recent": Recent(60.0, 0, None, None, refused).word()}, connections=1.0)

    then = Look(0.0, (gateway("gateway-0", no_path=1), gateway("gateway-1", overloaded=4)))
    now = Look(2.0, (gateway("gateway-0", no_path=3), gateway("gateway-1", overloaded=4, no_path=2)))
    told: list[Any] = [(one.reason, one.count, one.rate) for one in picture(then, now).refusals]
    assert told == [("no_path", 5, 2.0), ("overloaded", 4, 0.0)]
