"""Requests that outlive their workers, and clients that do not outlive their requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway_front import Front, eventually, front, says, silence
from support.scripted_cluster import Job, ScriptedConductor, ScriptedDecode, Served, serve
from support.strict_sse import parsed
from support.tiny_tokenizer import ids_of

from moonpool.cluster.gateway.attempts import Attempts
from moonpool.cluster.gateway.conductors import Conductors
from moonpool.cluster.gateway.decode_client import DecodeStreams
from moonpool.cluster.gateway.ledger import Ledger
from moonpool.core.config import TimingConfig
from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import RequestId, Role
from moonpool.core.lifetime import Lifetime
from moonpool.core.membership import Liveness
from moonpool.core.placement import Placement, PlaceRequest
from moonpool.core.request import FinishReason, Request, SamplingParams

BODY: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 20}


async def ask(tiny: Front, **fields: Any) -> tuple[int, str]:
    answer = await tiny.client.post("/v1/completions", json={**BODY, **fields})
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.json()["error"][
        "code"
    ]


async def streamed(
    tiny: Front, *, after: int = 0, act: Callable[[], Awaitable[None]] | None = None
) -> tuple[str, list[dict[str, Any]], bool]:
    """Text, events, whether it ended with [DONE]; ``act`` is awaited once ``after`` events have arrived."""
    raw = b""
    async with tiny.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        async for part in answer.aiter_bytes():
            raw += part
            if act is not None and raw.count(b"\n\n") >= after:
                await act()
                act = None
    sse = parsed(raw)
    text = "".join(c["text"] for e in sse.events for c in e.get("choices", ()))
    return text, sse.events, sse.done


def place_by_exclusion(*workers: Served) -> Any:
    """The first decode worker that is not excluded."""

    def decide(request: PlaceRequest) -> Placement | Failure:
        for worker in workers:
            if worker.member.id not in request.exclude:
                return Placement(worker.ref, worker.ref, booking=request.attempt)
        return Failure(Reason.NO_PATH, "no decode worker", retry_after_s=1)

    return decide


async def second_worker(tiny: Front, script: Any) -> tuple[ScriptedDecode, Served]:
    decode = ScriptedDecode(script)
    worker = await serve(Role.DECODE, decode, name="decode-1")
    tiny.membership.say(worker.member)
    tiny.conductor.decide = place_by_exclusion(tiny.decode_server, worker)
    return decode, worker


async def test_a_worker_killed_in_the_middle_is_followed_by_another_and_no_id_is_lost_or_doubled(tiny: Front) -> None:
    ids = ids_of(tiny.model_dir, *"abcdef")

    async def dies(job: Job) -> None:
        await job.say(ids[:3], cached=3)
        await job.cancelled.wait()

    tiny.decode.script = dies
    other, worker = await second_worker(tiny, says(*ids))
    try:
        text, events, done = await streamed(tiny, after=3, act=tiny.decode_server.kill)
    finally:
        await worker.kill()
    assert (text, done) == ("abcdef", True)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    (job,) = other.jobs
    assert (job.attempt.number, job.attempt.emitted) == (2, tuple(ids[:3]))
    assert tiny.conductor.placed[1].exclude == ("decode-0",)
    first, last = [await asyncio.wait_for(tiny.conductor.finished.get(), 2) for _ in range(2)]
    assert (first.outcome, first.output_tokens, first.cached_tokens) == ("peer_silent", 3, 3)
    assert (last.outcome, last.output_tokens, last.booking) == ("ok", 3, 2)


async def test_a_worker_that_membership_calls_silent_is_left_at_once(tiny: Front) -> None:
    tiny.decode.script = silence
    other, worker = await second_worker(tiny, says(*ids_of(tiny.model_dir, "ok")))
    asked = asyncio.create_task(ask(tiny))
    await asyncio.wait_for(tiny.decode.arrived.get(), 5)
    tiny.membership.say(tiny.decode_server.member, Liveness.SILENT, "missed heartbeats")
    try:
        assert await asyncio.wait_for(asked, 1) == (200, "ok")
    finally:
        await worker.kill()
    assert len(other.jobs) == 1


@pytest.mark.parametrize("reason", [Reason.PEER_SILENT, Reason.TRANSFER_FAILED, Reason.DIGEST_MISMATCH, Reason.BUSY])
async def test_a_failed_attempt_is_followed_by_the_next_one(tiny: Front, reason: Reason) -> None:
    ids = ids_of(tiny.model_dir, *"abc")

    async def script(job: Job) -> None:
        if job.attempt.number == 1:
            await job.say(ids[:1])
            await job.fail(reason, peer="prefill-0")
        else:
            await job.say(ids[1:], finish=FinishReason.LENGTH)

    tiny.decode.script = script
    assert await ask(tiny) == (200, "abc")
    assert [r.exclude for r in tiny.conductor.placed] == [(), ("prefill-0",)]
    assert tiny.decode.jobs[0].attempt.request.sampling.seed == tiny.decode.jobs[1].attempt.request.sampling.seed
    assert tiny.decode.streams == 1


async def test_the_only_worker_is_asked_again_after_it_said_busy(tiny: Front) -> None:
    async def script(job: Job) -> None:
        if job.attempt.number == 1:
            await job.fail(Reason.BUSY, peer="decode-0")
        else:
            await job.say(ids_of(tiny.model_dir, "ok"), finish=FinishReason.LENGTH)

    tiny.decode.script = script
    tiny.conductor.decide = place_by_exclusion(tiny.decode_server)
    assert await ask(tiny) == (200, "ok")


async def test_three_attempts_are_the_most(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.fail(Reason.TRANSFER_FAILED)

    tiny.decode.script = script
    assert await ask(tiny) == (503, "transfer_failed")
    assert [job.attempt.number for job in tiny.decode.jobs] == [1, 2, 3]


async def test_an_error_that_no_attempt_can_mend_is_not_tried_again(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.fail(Reason.LAYOUT_MISMATCH)

    tiny.decode.script = script
    assert await ask(tiny) == (409, "layout_mismatch")
    assert len(tiny.decode.jobs) == 1


async def test_without_patience_a_stream_whose_last_worker_dies_ends_with_one_error_event_within_a_second(
    tiny_dir: Path,
) -> None:
    killed = 0.0

    async def dies(job: Job) -> None:
        await job.say(ids_of(tiny.model_dir, *"abcde"))
        await job.cancelled.wait()

    async def kill() -> None:
        nonlocal killed
        killed = time.monotonic()
        await tiny.decode_server.kill()

    async with front(tiny_dir, config={"timing": {"path_wait_ms": 0}}) as tiny:
        tiny.decode.script = dies
        tiny.conductor.decide = place_by_exclusion(tiny.decode_server)
        text, events, done = await streamed(tiny, after=5, act=kill)
    assert time.monotonic() - killed < 1
    assert (text, done) == ("abcde", False)
    assert [e for e in events if "error" in e] == events[-1:]
    assert events[-1]["error"]["code"] == "peer_silent"


async def test_a_stream_goes_on_once_its_last_worker_has_come_back(tiny: Front) -> None:
    ids = ids_of(tiny.model_dir, *"abcdef")
    backs: list[Served] = []

    async def dies(job: Job) -> None:
        await job.say(ids[:3])
        await job.cancelled.wait()

    async def kill() -> None:
        tiny.conductor.decide = lambda _: Failure(Reason.NO_PATH, "no decode worker", retry_after_s=1.0)
        await tiny.decode_server.kill()
        await eventually(lambda: len(tiny.conductor.placed) >= 4, 5)  # nobody can take it
        back = await serve(Role.DECODE, ScriptedDecode(says(*ids)), name="decode-0", life=2)
        backs.append(back)
        tiny.membership.say(back.member)
        tiny.conductor.decide = place_by_exclusion(back)

    tiny.decode.script = dies
    try:
        text, events, done = await streamed(tiny, after=3, act=kill)
    finally:
        for back in backs:
            await back.kill()
    assert (text, done) == ("abcdef", True)
    assert not [e for e in events if "error" in e]


async def test_how_each_attempt_ended_is_told_once_with_the_peer_that_failed_it(tiny: Front) -> None:
    ids, heard = ids_of(tiny.model_dir, *"abc"), []

    async def script(job: Job) -> None:
        if job.attempt.number == 1:
            await job.say(ids[:1])
            await job.fail(Reason.PEER_SILENT, peer="prefill-0")
        else:
            await job.say(ids[1:], finish=FinishReason.LENGTH)

    tiny.decode.script = script
    loop = asyncio.get_running_loop()
    conductors, streams = Conductors(tiny.membership, TimingConfig()), DecodeStreams(tiny.membership)
    request = Request(RequestId("told"), (1, 2, 3), SamplingParams(max_tokens=3), bytes(16), ())
    ledger = Ledger(request, started=loop.time(), budget_ms=5_000, max_attempts=3, life_of=lambda _: None)
    attempts = Attempts(ledger, Lifetime(), conductors, streams, on_ended=heard.append)
    try:
        async with aclosing(attempts.emissions()) as emissions:
            assert [e.sampled.token async for e in emissions if e.sampled] == ids
    finally:
        await streams.close()
        await conductors.close()
    assert [(h.reason, h.peer, h.placement.decode.id) for h in heard] == [
        (Reason.PEER_SILENT, "prefill-0", "decode-0"),
        (None, "", "decode-0"),
    ]


async def test_late_and_foreign_emissions_change_nothing(tiny: Front) -> None:
    ids = ids_of(tiny.model_dir, *"abcd")

    async def script(job: Job) -> None:
        if job.attempt.number == 1:
            await job.say(ids[:2])
            await job.fail(Reason.DIGEST_MISMATCH)
            return
        await tiny.decode.jobs[0].say([99, 98], position=2)
        await job.say(ids[:2], position=0)
        await job.say(ids[2:], finish=FinishReason.LENGTH)

    tiny.decode.script = script
    text, _, done = await streamed(tiny)
    assert (text, done) == ("abcd", True)


async def test_the_budget_ends_a_request_that_nobody_answers(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"timing": {"request_budget_ms": 1_000}}) as tiny:
        tiny.decode.script = silence
        assert await ask(tiny) == (504, "deadline_passed")
        await asyncio.wait_for(tiny.decode.jobs[0].cancelled.wait(), 2)
        assert 0 < tiny.decode.jobs[0].attempt.deadline_ms <= 1_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "decoding"])
async def test_a_client_that_leaves_cancels_its_attempt(tiny: Front, stream: bool, phase: str) -> None:
    said = asyncio.Event()

    async def script(job: Job) -> None:
        if phase == "decoding":
            await job.say(ids_of(tiny.model_dir, "ab"))
        said.set()
        await job.cancelled.wait()

    tiny.decode.script = script
    asked = asyncio.create_task(tiny.client.post("/v1/completions", json={**BODY, "stream": stream}))
    await asyncio.wait_for(said.wait(), 5)
    asked.cancel()  # closes the connection
    await asyncio.wait_for(tiny.decode.jobs[0].cancelled.wait(), 2)
    assert (await asyncio.wait_for(tiny.conductor.finished.get(), 2)).outcome == "cancelled"
    assert tiny.gateway.numbers()["requests_in_flight"] == 0
    metrics = (await tiny.client.get("/metrics")).text
    assert 'outcome="cancelled"} 1.0' in metrics
    assert 'outcome="ok"} 1.0' not in metrics


async def test_a_client_that_leaves_while_its_request_waits_for_a_placement(tiny: Front) -> None:
    tiny.conductor.decide = lambda request: None
    asked = asyncio.create_task(tiny.client.post("/v1/completions", json=BODY))
    await eventually(lambda: tiny.conductor.placed)
    asked.cancel()
    await eventually(lambda: not tiny.gateway.numbers()["requests_in_flight"])
    assert tiny.gateway.numbers()["placing"] == 0
    assert (await asyncio.wait_for(tiny.conductor.finished.get(), 2)).outcome == "cancelled"


async def test_one_of_two_requests_with_one_client_id_leaves_and_the_other_stays(tiny: Front) -> None:
    go = asyncio.Event()

    async def script(job: Job) -> None:
        await go.wait()
        await job.say(ids_of(tiny.model_dir, "ok"), finish=FinishReason.LENGTH)

    tiny.decode.script = script
    headers = {"x-request-id": "same"}
    first, second = (asyncio.create_task(tiny.client.post("/v1/completions", json=BODY, headers=headers)) for _ in range(2))
    for _ in range(2):
        await asyncio.wait_for(tiny.decode.arrived.get(), 5)
    first.cancel()
    await eventually(lambda: any(job.cancelled.is_set() for job in tiny.decode.jobs))
    go.set()
    assert (await second).json()["choices"][0]["text"] == "ok"
    assert sum(job.cancelled.is_set() for job in tiny.decode.jobs) == 1


async def test_a_dead_conductor_is_passed_over(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "ok"))
    other = ScriptedConductor(tiny.conductor.decide)
    served = await serve(Role.CONDUCTOR, other, name="conductor-1")
    tiny.membership.say(served.member)
    await tiny.conductor_server.kill()
    try:
        assert await ask(tiny) == (200, "ok")
        assert (await asyncio.wait_for(other.finished.get(), 2)).outcome == "ok"
    finally:
        await served.kill()


async def test_a_frozen_conductor_is_passed_over_after_its_time(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"timing": {"place_timeout_ms": 100}}) as tiny:
        tiny.decode.script = says(*ids_of(tiny.model_dir, "ok"))
        other = ScriptedConductor(tiny.conductor.decide)
        served = await serve(Role.CONDUCTOR, other, name="conductor-1")
        tiny.membership.say(served.member)
        tiny.conductor.decide = lambda request: None
        try:
            assert await ask(tiny) == (200, "ok")
            assert await ask(tiny) == (200, "ok")
            assert len(tiny.conductor.placed) == 1  # the one that answered is asked first from then on
        finally:
            await served.kill()


async def test_a_request_waits_for_a_conductor_to_come_back(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "ok"))
    tiny.membership.say(tiny.conductor_server.member, Liveness.GONE, "killed")
    asked = asyncio.create_task(ask(tiny))
    await eventually(lambda: tiny.gateway.numbers()["placing"])
    tiny.membership.say(tiny.conductor_server.member)
    assert await asyncio.wait_for(asked, 2) == (200, "ok")


async def test_without_a_conductor_a_request_gets_503_after_its_wait(tiny_dir: Path) -> None:
    async with front(tiny_dir, config={"timing": {"conductor_wait_ms": 300}}) as tiny:
        tiny.membership.say(tiny.conductor_server.member, Liveness.GONE, "killed")
        answer = await tiny.client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_path")
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_worker_restarted_since_it_was_placed_is_placed_again(tiny: Front) -> None:
    decode = ScriptedDecode(says(*ids_of(tiny.model_dir, "ok")))
    newer = await serve(Role.DECODE, decode, life=2)
    tiny.membership.say(newer.member)
    refs = [tiny.decode_server.ref, newer.ref]
    tiny.conductor.decide = lambda request: Placement(refs[request.attempt - 1], refs[request.attempt - 1])
    try:
        assert await ask(tiny) == (200, "ok")
    finally:
        await newer.kill()
    assert not tiny.decode.jobs
    assert not tiny.conductor.placed[1].exclude


async def test_every_placement_is_given_back_whatever_happens_to_its_request(tiny: Front) -> None:
    """Fifty requests that finish, fail, are left by their clients or stop by themselves, all at once."""
    chance = random.Random(7)
    fates = [chance.choice(["answer", "fail once", "fail", "leave", "stop"]) for _ in range(50)]

    async def script(job: Job) -> None:
        fate = fates[job.attempt.request.sampling.seed]
        ids = ids_of(tiny.model_dir, *"abcd.")[len(job.attempt.emitted) :]
        if fate == "fail" or (fate == "fail once" and job.attempt.number == 1):
            await job.say(ids[:2])
            await job.fail(Reason.TRANSFER_FAILED)
        elif fate == "leave":
            await job.say(ids[:1])
            await job.cancelled.wait()
        else:
            await job.say(ids, finish=FinishReason.LENGTH)

    async def one(number: int) -> int | str:
        body = {**BODY, "seed": number, "stream": number % 2 == 0, **({"stop": "b"} if fates[number] == "stop" else {})}
        try:
            return (
                await tiny.client.post("/v1/completions", json=body, timeout=3 if fates[number] == "leave" else 30)
            ).status_code
        except httpx.TimeoutException:
            return "left"

    tiny.decode.script = script
    endings = await asyncio.gather(*(one(n) for n in range(50)))
    for number, fate in enumerate(fates):
        streamed_error = number % 2 == 0
        right = {"leave": "left", "fail": 200 if streamed_error else 503}.get(fate, 200)
        assert endings[number] == right, fate
    await eventually(lambda: tiny.conductor.finished.qsize() >= len(tiny.conductor.placed))
    told = [tiny.conductor.finished.get_nowait() for _ in range(tiny.conductor.finished.qsize())]
    assert sorted((t.request, t.attempt) for t in told) == sorted((p.request, p.attempt) for p in tiny.conductor.placed)
    assert tiny.gateway.numbers()["requests_in_flight"] == 0
    assert all(job.cancelled.is_set() for job in tiny.decode.jobs if fates[job.attempt.request.sampling.seed] == "leave")
