"""Requests that a conductor lets wait for a worker: they are not cut off, and do not outlive it, nor their clients."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.gateway_front import Front, eventually, front, says
from support.scripted_cluster import ScriptedConductor, Served, serve
from support.tiny_tokenizer import ids_of

from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import Liveness
from moonpool.core.placement import Placement, PlaceRequest

BODY: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 20}


@dataclass
class Queue:
    """Decides for a scripted conductor: whoever asks waits until ``free`` is set."""

    worker: Served
    free: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, request: PlaceRequest) -> Placement | Failure | asyncio.Event:
        return Placement(self.worker.ref, self.worker.ref, booking=3) if self.free.is_set() else self.free


@asynccontextmanager
async def waiting_front(tiny_dir: Path, **timing: int) -> AsyncIterator[tuple[Front, Queue]]:
    async with front(tiny_dir, config={"timing": {"place_timeout_ms": 200, **timing}}) as tiny:
        tiny.decode.script = says(*ids_of(tiny.model_dir, "ok"))
        tiny.conductor.decide = queue = Queue(tiny.decode_server)
        yield tiny, queue


@asynccontextmanager
async def second_conductor(tiny: Front) -> AsyncIterator[ScriptedConductor]:
    other = ScriptedConductor(lambda _: Placement(tiny.decode_server.ref, tiny.decode_server.ref, booking=9))
    server = await serve(Role.CONDUCTOR, other, name="conductor-1")
    tiny.membership.say(server.member)
    try:
        yield other
    finally:
        await server.kill()


def ask(tiny: Front) -> asyncio.Task[int]:
    async def status() -> int:
        return (await tiny.client.post("/v1/completions", json=BODY)).status_code

    return asyncio.create_task(status())


async def test_a_request_waits_for_a_worker_much_longer_than_a_conductor_has_to_answer(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir, conductor_wait_ms=300) as (tiny, queue):
        asked = ask(tiny)
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 1)
        await asyncio.sleep(0.8)
        assert not asked.done()
        assert tiny.conductor.asked_alive >= 1
        queue.free.set()
        assert await asked == 200
        assert len(tiny.conductor.placed) == 1
        assert tiny.gateway.numbers()["waiting_at_conductors"] == 0
        assert tiny.conductor.taken_back.empty()


async def test_one_question_watches_over_all_who_wait_and_none_is_asked_when_nobody_does(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir) as (tiny, queue):
        asked = [ask(tiny) for _ in range(12)]
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 12)
        await asyncio.sleep(1.1)
        assert 1 <= tiny.conductor.asked_alive <= 3
        queue.free.set()
        assert await asyncio.gather(*asked) == [200] * 12
        before = tiny.conductor.asked_alive
        await asyncio.sleep(0.7)
        assert tiny.conductor.asked_alive == before


async def test_a_conductor_that_freezes_while_requests_wait_is_passed_over_within_two_seconds(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir, place_timeout_ms=1_000) as (tiny, _), second_conductor(tiny) as other:
        asked = ask(tiny)
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 1)
        began = time.monotonic()
        tiny.conductor.alive.clear()
        assert await asked == 200
        assert time.monotonic() - began < 2.0, "a bound that the design gives, not a speed"
        assert len(other.placed) == 1
        assert await asyncio.wait_for(tiny.conductor.taken_back.get(), 2) == other.placed[0].request


async def test_a_conductor_that_the_registry_calls_silent_is_left_at_once(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir) as (tiny, _), second_conductor(tiny) as other:
        asked = ask(tiny)
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 1)
        tiny.membership.say(tiny.conductor_server.member, Liveness.SILENT, "no heartbeat")
        assert await asyncio.wait_for(asked, 0.4) == 200
        assert len(other.placed) == 1


async def test_a_request_whose_conductor_says_nothing_goes_on_when_the_channel_is_closed_under_its_call(tiny_dir: Path) -> None:
    """The registry calls the conductor silent, and the next request to another one lets go of the channel."""
    mute = socket.create_server(("127.0.0.1", 0))  # connects, and never says a word
    with mute:
        async with waiting_front(tiny_dir, place_timeout_ms=5_000) as (tiny, _):
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            frozen = replace(tiny.conductor_server.member, id=MemberId("conductor-m"), address=address)
            tiny.membership.say(tiny.conductor_server.member, Liveness.GONE, "left")
            tiny.membership.say(frozen)
            first = ask(tiny)
            await eventually(lambda: tiny.gateway.numbers()["placing"] == 1)
            tiny.membership.say(frozen, Liveness.SILENT, "no heartbeat")
            async with second_conductor(tiny) as other:
                assert await ask(tiny) == 200
                assert await asyncio.wait_for(first, 2) == 200
                assert len(other.placed) == 2


async def test_a_killed_conductor_hands_those_who_wait_to_the_next_one(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir) as (tiny, _), second_conductor(tiny) as other:
        asked = [ask(tiny) for _ in range(3)]
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 3)
        await tiny.conductor_server.kill()
        assert await asyncio.gather(*asked) == [200] * 3
        assert len(other.placed) == 3


async def test_a_client_that_leaves_takes_its_waiting_request_back(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir) as (tiny, _):
        asked = ask(tiny)
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 1)
        asked.cancel()
        assert await asyncio.wait_for(tiny.conductor.taken_back.get(), 2) == tiny.conductor.placed[0].request
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 0)


async def test_a_request_still_waiting_at_its_end_is_a_504(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir, request_budget_ms=1_000) as (tiny, _):
        assert await asyncio.wait_for(ask(tiny), 5) == 504
        assert tiny.gateway.numbers()["requests_in_flight"] == 0


async def test_a_refusal_may_come_after_a_wait(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir) as (tiny, queue):
        asked = ask(tiny)
        await eventually(lambda: tiny.gateway.numbers()["waiting_at_conductors"] == 1)
        tiny.conductor.decide = lambda _: Failure(Reason.TARGETS_MISSED, "too late now", retry_after_s=2)
        queue.free.set()
        assert await asked == 429


async def test_the_end_of_a_request_while_its_conductor_thinks_is_not_held_against_the_conductor(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir, place_timeout_ms=1_000) as (tiny, queue):
        tiny.conductor.decide = lambda _: None
        late = await tiny.client.post("/v1/completions", json=BODY, headers={"x-deadline-ms": "100"})
        assert (late.status_code, tiny.gateway.numbers()["conductors_passed_over"]) == (504, 0)
        tiny.conductor.decide = queue
        queue.free.set()
        assert await ask(tiny) == 200


async def test_a_request_whose_time_is_over_while_no_conductor_is_there_hears_so(tiny_dir: Path) -> None:
    async with waiting_front(tiny_dir, conductor_wait_ms=5_000) as (tiny, _):
        tiny.membership.say(tiny.conductor_server.member, Liveness.GONE, "left")
        late = await tiny.client.post("/v1/completions", json=BODY, headers={"x-deadline-ms": "100"})
        assert late.status_code == 504
