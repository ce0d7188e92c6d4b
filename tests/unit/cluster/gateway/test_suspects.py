"""Workers that fail again and again while the registry calls them live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateway_front import eventually, front, says
from support.scripted_cluster import Job, ScriptedConductor, ScriptedDecode, Served, serve
from support.tiny_tokenizer import ids_of

from moonpool.cluster.gateway.suspects import FAULTS, PACE, Suspects
from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.placement import Placement, PlaceRequest, WorkerRef

SILENT = Reason.PEER_SILENT


def worker(name: str, life: int = 1) -> Member:
    return Member(MemberId(name), Role(name.split("-")[0]), NodeId("a"), Incarnation(life), "h:1", 1)


def ref(name: str, life: int = 1) -> WorkerRef:
    return WorkerRef(MemberId(name), Incarnation(life), NodeId("a"), "h:1")


def on(prefill: str, decode: str, life: int = 1) -> Placement:
    return Placement(ref(prefill, life), ref(decode, life))


ALL = [worker(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]


def fail(suspects: Suspects, times: int, peer: str = "prefill-0", *, now: float = 0.0, reason: Reason = SILENT) -> None:
    for _ in range(times):
        suspects.ended(on("prefill-0", "decode-0"), reason, peer, now, 0.5)


def test_one_that_fails_attempts_in_a_row_is_avoided_and_the_other_of_the_attempt_is_not() -> None:
    suspects = Suspects()
    fail(suspects, PACE.failures - 1)
    assert suspects.avoid(ALL, 0.0) == ()
    fail(suspects, 1)
    assert suspects.avoid(ALL, 0.0) == ("prefill-0",)
    assert suspects.count(0.0) == 1


@pytest.mark.parametrize("reason", [r for r in Reason if r not in FAULTS])
def test_what_is_no_fault_of_a_worker_is_not_held_against_it(reason: Reason) -> None:
    suspects = Suspects()
    fail(suspects, 10, reason=reason)
    assert suspects.avoid(ALL, 0.0) == ()


def test_an_answer_between_failures_begins_the_count_anew() -> None:
    suspects = Suspects()
    for _ in range(5):
        fail(suspects, PACE.failures - 1)
        suspects.ended(on("prefill-0", "decode-1"), None, "", 0.0, 0.5)
    assert suspects.avoid(ALL, 0.0) == ()


def test_kinds_of_failures_are_counted_apart() -> None:
    suspects = Suspects()
    fail(suspects, 2)
    fail(suspects, 2, reason=Reason.DIGEST_MISMATCH)
    assert suspects.avoid(ALL, 0.0) == ()
    fail(suspects, 1, reason=Reason.DIGEST_MISMATCH)
    assert suspects.avoid(ALL, 0.0) == ("prefill-0",)


def test_one_attempt_probes_it_while_the_others_go_on_avoiding_it() -> None:
    suspects = Suspects()
    fail(suspects, 3)
    assert suspects.avoid(ALL, 0.8) == ()
    suspects.placed(on("prefill-1", "decode-0"), 0.8)
    assert suspects.avoid(ALL, 0.8) == (), "that one did not come to it"
    suspects.placed(on("prefill-0", "decode-0"), 0.8)
    assert suspects.avoid(ALL, 0.9) == ("prefill-0",)
    suspects.ended(on("prefill-0", "decode-0"), None, "", 1.0, 0.5)
    assert suspects.avoid(ALL, 1.0) == ()


def test_a_probe_that_another_worker_failed_says_nothing_and_is_followed_by_another() -> None:
    suspects = Suspects()
    fail(suspects, 3)
    suspects.placed(on("prefill-0", "decode-0"), 0.8)
    suspects.ended(on("prefill-0", "decode-0"), SILENT, "decode-0", 0.9, 0.5)
    assert suspects.avoid(ALL, 0.9) == ()


def test_a_newer_life_begins_without_blame_and_one_that_is_over_is_forgotten() -> None:
    suspects = Suspects()
    fail(suspects, 3)
    assert suspects.avoid([worker("prefill-0", 2), worker("prefill-1")], 0.0) == ()
    suspects.heard(MemberChange(worker("prefill-0", 2), Liveness.LIVE))
    assert suspects.count(0.0) == 0
    fail(suspects, 3)
    suspects.heard(MemberChange(worker("prefill-0"), Liveness.SILENT, "no heartbeat"))
    assert suspects.count(0.0) == 0


def test_workers_that_are_all_that_is_left_are_used() -> None:
    suspects = Suspects()
    fail(suspects, 3)
    left = [worker("prefill-0"), replace(worker("prefill-1"), ready=False), worker("decode-0")]
    assert suspects.avoid(left, 0.0) == ()


@given(st.lists(st.tuples(st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1"]), st.floats(0, 5)), max_size=60))
def test_there_is_always_somebody_of_each_role(failures: Sequence[tuple[str, float]]) -> None:
    suspects, now = Suspects(), 0.0
    for peer, passed in failures:
        now += passed
        suspects.ended(on("prefill-0" if peer[-1] == "0" else "prefill-1", f"decode-{peer[-1]}"), SILENT, peer, now, 0.5)
        avoided = suspects.avoid(ALL, now)
        for role in ("prefill", "decode"):
            assert sum(name.startswith(role) for name in avoided) < 2


# at the gateway


BODY: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 20}


def first_allowed(workers: Sequence[Served]) -> Any:
    """Decides for a conductor: the first worker that is not excluded."""

    def decide(request: PlaceRequest) -> Placement | Failure:
        left = [worker for worker in workers if worker.member.id not in request.exclude]
        if not left:
            return Failure(Reason.NO_PATH, "nobody is left", retry_after_s=1.0)
        return Placement(left[0].ref, left[0].ref, booking=1)

    return decide


async def breaks(job: Job) -> None:
    await job.fail(Reason.PEER_SILENT, peer="decode-0")


async def test_a_failing_worker_is_left_out_of_placements_until_one_attempt_finds_it_well(tiny_dir: Path) -> None:
    async with front(tiny_dir) as tiny:
        well = says(*ids_of(tiny.model_dir, "ok"))
        other = ScriptedDecode(well)
        second = await serve(Role.DECODE, other, name="decode-1")
        tiny.membership.say(second.member)
        tiny.conductor.decide = first_allowed([tiny.decode_server, second])
        tiny.decode.script = breaks
        try:
            for _ in range(6):
                assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(tiny.decode.jobs) == PACE.failures
            assert tiny.gateway.numbers()["workers_avoided"] == 1
            tiny.decode.script = well
            await eventually(lambda: tiny.gateway.numbers()["workers_avoided"] == 0)
            assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(tiny.decode.jobs) == PACE.failures + 1
        finally:
            await second.kill()


async def test_where_only_an_avoided_worker_is_left_it_is_used(tiny_dir: Path) -> None:
    """By the conductor's word: membership still names another one."""
    async with front(tiny_dir) as tiny:
        ghost = await serve(Role.DECODE, ScriptedDecode(breaks), name="decode-1")
        tiny.membership.say(ghost.member)
        tiny.conductor.decide = first_allowed([tiny.decode_server])
        tiny.decode.script = breaks
        try:
            await tiny.client.post("/v1/completions", json=BODY)
            tiny.decode.script = says(*ids_of(tiny.model_dir, "ok"))
            assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
        finally:
            await ghost.kill()


async def test_a_conductor_that_says_nothing_is_asked_last_until_it_answers_a_probe(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"timing": {"place_timeout_ms": 150}}) as tiny:
        tiny.decode.script = says(*ids_of(tiny.model_dir, "ok"))
        place = tiny.conductor.decide
        other = ScriptedConductor(place)
        second = await serve(Role.CONDUCTOR, other, name="conductor-1")
        leader = replace(tiny.conductor_server.member, term=2)
        tiny.membership.say(leader)
        tiny.membership.say(second.member)
        tiny.conductor.decide = lambda _: None
        try:
            for _ in range(4):
                assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(tiny.conductor.placed) == 1
            assert len(other.placed) == 4
            tiny.conductor.decide = place

            async with asyncio.timeout(5):
                while len(tiny.conductor.placed) < 3:
                    assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
            before = len(other.placed)
            assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
            assert len(other.placed) == before, "the leading one is asked first again"
        finally:
            await second.kill()
