"""A landing whose writer is through before the reader was ever told of it is ended by the reader, once it is of no use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from moonpool.core.errors import Failure, Reason
from moonpool.core.handoff import FirstToken, PrefillJob
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import Landing, LandingSlot, SlotRef
from moonpool.core.placement import WorkerRef
from moonpool.core.request import Attempt, PromptLogprobs, Request, SamplingParams
from moonpool.kvstore.handoffs.handoff import Handoff
from moonpool.wire import pb

PREFILL = WorkerRef(MemberId("prefill-0"), Incarnation(1), NodeId("a"), "")
LOST = Failure(Reason.PEER_SILENT, "prefill-0 is gone")


class Client:
    def __init__(self) -> None:
        self.ended: list[int] = []

    async def end_landing(self, landing: int) -> None:
        self.ended.append(landing)


class Copies:
    def copy(self, client: Any, layer: int, work: Any, stop: Any, done: Callable[[Any], None]) -> None:
        done(None)


class Owner:
    def __init__(self) -> None:
        self.released = self.joined = 0

    def first_token_ends(self, first: FirstToken) -> bool:
        return False

    def prompt_logprobs(self, part: PromptLogprobs) -> None: ...

    def emit_first(self, first: FirstToken, *, ends: bool) -> None: ...

    def join(self) -> None:
        self.joined += 1

    def fail(self, failure: Failure) -> None: ...

    def release(self) -> None:
        self.released += 1

    def copied(self, layer: int, blocks: Sequence[int]) -> None: ...


def handoff() -> tuple[Handoff, Client, Owner]:
    client, owner = Client(), Owner()
    attempt = Attempt(Request(RequestId("r"), (1,), SamplingParams(4), bytes(16), ()), 1)
    job = PrefillJob(attempt, (), PREFILL, NodeId("b"))
    parts: tuple[Any, ...] = [0], 1, client, Copies()
    return Handoff(job, PREFILL, *parts, owner), client, owner


def landing(number: int) -> Landing:
    held = (LandingSlot(0, SlotRef(0, 0, bytes(16)), 16),)
    return Landing(number, RequestId("r"), 1, NodeId("b"), Incarnation(1), 1, PREFILL.id, (), held)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_that_is_whole_waits_for_the_word_of_it_and_ends_with_the_attempt() -> None:
    work, client, owner = handoff()
    work.landing_through(7, None)
    await settle()
    assert not client.ended, "the word of it may still be on its way"
    work.fail(LOST)
    await settle()
    assert client.ended == [7]
    assert owner.released == 1


async def test_one_that_is_whole_and_told_of_later_serves_the_attempt() -> None:
    work, client, owner = handoff()
    work.landing_through(7, None)
    work._tell(lambda: work._sink.begun(landing(7)))
    await settle()
    assert not client.ended
    work.cancel()
    await settle()
    assert client.ended == [7]
    assert owner.released == 1


async def test_one_that_is_whole_and_heard_of_after_the_attempt_ends_at_once() -> None:
    work, client, _ = handoff()
    work.fail(LOST)
    await settle()
    work.landing_through(7, None)
    await settle()
    assert client.ended == [7]


async def test_one_that_is_torn_ends_at_once() -> None:
    work, client, owner = handoff()
    work.landing_through(7, LOST)
    await settle()
    assert client.ended == [7]
    assert owner.released == 1


async def test_an_event_that_cannot_be_read_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        async def __aiter__(self) -> AsyncIterator[None]:
            yield None  # gRPC gives this for bytes that are no message

        def cancel(self) -> None: ...

    class Stub:
        def __init__(self, channel: object) -> None: ...

        def Run(self, job: object) -> Call:
            return Call()

    monkeypatch.setattr(pb.prefill_rpc, "PrefillStub", Stub)
    work, _, owner = handoff()
    channel: Any = None
    await work.run(channel)
    assert owner.released == 1
