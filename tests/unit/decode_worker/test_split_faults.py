"""Faults of the split path: each ends its attempts in bounded time, and the next request is served."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.split import Split, split_path
from support.store import until
from support.workers import idle

from moonpool.core.config import TimingConfig
from moonpool.core.errors import DigestMismatch, Failure, Reason, TransferFailed
from moonpool.core.ids import Incarnation
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Placement
from moonpool.kvstore.client import WorkerStore
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire


def ids(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(128), k=n)


async def serves(split: Split, seed: int = 99) -> None:
    request = split.asker.request(ids(70, seed), max_tokens=4)
    answer = await split.gateway.ask_until_answered(request)
    assert answer.ids == split.oracle(request)
    await split.idle()


async def test_an_engine_error_in_prefill_ends_its_attempt_alone(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        engine = split.prefill_engines[0]
        forward = engine.forward

        def broken(*args: Any, **hooks: Any) -> Any:
            engine.forward = forward  # type: ignore[method-assign]
            raise RuntimeError("out of luck")

        engine.forward = broken  # type: ignore[method-assign]
        answer = await split.gateway.ask(split.asker.request(ids(50)))
        assert answer.error is not None and answer.error.reason is Reason.BUG and "out of luck" in answer.error.message
        await split.idle()
        await serves(split)


async def test_an_engine_error_in_a_step_ends_its_rows_alone(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        answer = split.gateway.begin(split.asker.request(ids(50), max_tokens=500))
        await answer.count(3)
        forward = split.decode_engine.forward

        def broken(*args: Any, **hooks: Any) -> Any:
            split.decode_engine.forward = forward  # type: ignore[method-assign]
            raise RuntimeError("out of luck")

        split.decode_engine.forward = broken  # type: ignore[method-assign]
        await answer.over.wait()
        assert answer.error is not None and answer.error.reason is Reason.BUG
        await split.idle()
        await serves(split)


async def test_a_bad_copy_of_a_landed_slice_fails_the_attempt_and_the_next_one_lands_anew(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        read = WorkerStore.read_slice
        left = [3]

        def flipping(self: WorkerStore, slot: Any, layer: int, into: Any, valid: int) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise DigestMismatch(f"layer {layer}")
            read(self, slot, layer, into, valid)

        monkeypatch.setattr(WorkerStore, "read_slice", flipping)
        request = split.asker.request(ids(100), max_tokens=4)
        first = await split.gateway.ask(request)
        assert first.error is not None and first.error.reason is Reason.DIGEST_MISMATCH
        again = split.gateway.begin(request, number=2, emitted=first.ids)
        await again.over.wait()
        assert first.ids + again.ids == split.oracle(request)
        await split.idle()
        assert split.stores["b"].numbers()["digest_mismatches_landing_copy"] == 1


async def test_a_transfer_that_fails_for_good_is_told_by_the_source(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        pusher = split.prefills[0]._pusher
        grant = pusher.grant

        async def failing(*args: Any, **more: Any) -> Any:
            pusher.grant = grant  # type: ignore[method-assign]
            landing = await grant(*args, **more)
            landing.failure = Failure(Reason.TRANSFER_FAILED, "the line is cut", "store-a")
            return landing

        pusher.grant = failing  # type: ignore[method-assign]
        answer = await split.gateway.ask(split.asker.request(ids(50)))
        assert answer.error is not None
        assert answer.error.reason is Reason.TRANSFER_FAILED
        assert answer.error.peer in ("store-a", "prefill-0")  # its source, or the node that it gave up, whoever is heard first
        await split.idle()
        await serves(split)


async def test_a_landing_refused_for_good_fails_the_attempt(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        pusher = split.prefills[0]._pusher
        grant = pusher.grant

        async def unreachable(*args: Any, **more: Any) -> Any:
            pusher.grant = grant  # type: ignore[method-assign]
            raise TransferFailed("no route", peer="store-a")

        pusher.grant = unreachable  # type: ignore[method-assign]
        answer = await split.gateway.ask(split.asker.request(ids(50)))
        assert answer.error is not None and answer.error.reason is Reason.TRANSFER_FAILED
        await split.idle()
        await serves(split)


async def test_a_landing_granted_after_its_job_was_cancelled_is_given_back(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, nodes=("a", "b")) as split:
        pusher = split.prefills[0]._pusher
        grant = pusher.grant
        asked, go = asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **more: Any) -> Any:
            landing = await grant(*args, **more)  # where the store node says not now, the job comes again
            pusher.grant = grant  # type: ignore[method-assign]
            asked.set()
            await go.wait()
            return landing

        pusher.grant = slow  # type: ignore[method-assign]
        request = split.asker.request(ids(50))
        split.gateway.begin(request)
        try:
            await asked.wait()
            split.decode.cancel(split.gateway.stream, request.id, 1)
            await serves(split_without_idle(split))
            await until(lambda: split.stores["b"].numbers()["landings_open"] == 1, "the other landing to end")
        finally:
            go.set()
        await split.idle()


def split_without_idle(split: Split) -> Split:
    """The same, whose ``idle`` asks the workers only: a landing is held on purpose."""

    async def idle(seconds: float = 2.0) -> None:
        pass

    other = replace(split)
    other.idle = idle  # type: ignore[method-assign]
    return other


async def test_a_lost_store_session_fails_landings_at_once_and_comes_back_by_itself(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, prefill_chunk=16) as split:
        engine = split.prefill_engines[0]
        forward = engine.forward

        def slow(*args: Any, **hooks: Any) -> Any:
            time.sleep(0.02)  # on the compute thread: most chunks are still to come when the session ends, on any machine
            return forward(*args, **hooks)

        engine.forward = slow  # type: ignore[method-assign]
        answers = [split.gateway.begin(split.asker.request(ids(150, i), max_tokens=50)) for i in range(3)]
        while not any(answer.ids for answer in answers):  # the jobs may come to the prefill worker in any order # noqa: ASYNC110
            await asyncio.sleep(0.005)
        store = split.stores["a"]
        for session in list(store.sessions):
            store.sessions.end(session, "the test cuts it")
        async with asyncio.timeout(2.0):
            await asyncio.gather(*(answer.over.wait() for answer in answers))
        failed = [a.error for a in answers if a.error is not None]
        assert failed and {f.reason for f in failed} <= {Reason.PEER_SILENT, Reason.BUSY}
        assert {f.peer for f in failed} <= {"store-a", "decode-0"}, "the next attempts land elsewhere"
        async with asyncio.timeout(2.0):
            while not split.decode.numbers()["store_connected"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await serves(split_without_idle(split))  # a block that was being published may stay fenced while its writer lives
        await idle(split.decode)


async def test_without_a_store_session_a_hand_off_is_busy_at_once(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        split.decode._filler.link._drop()
        answer = await split.gateway.ask(split.asker.request(ids(50)))
        assert answer.error is not None and answer.error.reason is Reason.BUSY
        assert answer.error.peer == "decode-0"
        await split.idle()


async def test_a_decode_worker_that_falls_silent_loses_its_jobs(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, slots=4) as split:
        answer = split.gateway.begin(split.asker.request(ids(100)))  # seven blocks: no landing is ever granted
        await asyncio.sleep(0.1)
        assert split.prefills[0].numbers()["requests_live"] == 1
        split.crowd.tell(MemberChange(split.decode_member, Liveness.SILENT, "frozen"))
        await answer.over.wait()
        assert answer.error is not None and answer.error.reason is Reason.PEER_SILENT
        assert split.prefills[0].numbers()["requests_live"] == 0


async def test_a_prefill_worker_known_to_be_gone_is_not_even_asked(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        reborn = replace(split.prefill_members[0], incarnation=Incarnation(2))
        split.crowd.tell(MemberChange(reborn, Liveness.LIVE))
        answer = await split.gateway.ask(split.asker.request(ids(50)))
        assert answer.error is not None
        assert (answer.error.reason, answer.error.peer) == (Reason.PEER_SILENT, "prefill-0")
        await split.idle()


async def test_an_address_where_nobody_listens_is_a_silent_peer(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        prefill = replace(split.gateway.placement.prefill, address="127.0.0.1:1")
        split.gateway.placement = Placement(prefill, split.gateway.placement.decode)
        async with asyncio.timeout(5.0):
            answer = await split.gateway.ask(split.asker.request(ids(50)))
        assert answer.error is not None
        assert (answer.error.reason, answer.error.peer) == (Reason.PEER_SILENT, "prefill-0")
        await split.idle()


async def test_a_deadline_that_passes_in_the_prefill_queue_ends_both_sides(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, slots=4) as split:
        answer = split.gateway.begin(split.asker.request(ids(100)), deadline_ms=200)
        await answer.over.wait()
        assert answer.error is not None and answer.error.reason is Reason.DEADLINE
        await split.idle()


async def test_a_full_prefill_queue_is_busy_with_the_workers_name(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model, slots=4, timing=TimingConfig(queue_limit=2)) as split:
        answers = [split.gateway.begin(split.asker.request(ids(100, i)), deadline_ms=800) for i in range(2)]
        await asyncio.sleep(0.1)
        third = await split.gateway.ask(split.asker.request(ids(100, 2)))
        assert third.error is not None
        assert (third.error.reason, third.error.peer) == (Reason.BUSY, "prefill-0")
        await asyncio.gather(*(a.over.wait() for a in answers))
        await split.idle()


async def test_malformed_messages_are_refused_and_the_stream_goes_on(tmp_path: Path, tiny_model: Path) -> None:
    async with split_path(tmp_path, tiny_model) as split:
        async with grpc.aio.insecure_channel(split.decode_member.address) as channel:
            call = pb.decode_rpc.DecodeStub(channel).Tokens()
            bad = pb.decode.GatewayMessage()
            bad.start.attempt.request.id = "bad"
            bad.start.placement.segments.add(source="thin air")
            await call.write(bad)
            first = await call.read()
            assert first.emissions[0].request == "bad"
            assert first.emissions[0].error.reason == Reason.INVALID_REQUEST
            good = pb.decode.GatewayMessage()
            to_wire(split.gateway.placement, good.start.placement)
            from moonpool.core.request import Attempt, Emission

            request = split.asker.request(ids(20), max_tokens=5)
            to_wire(Attempt(request, 1), good.start.attempt)
            await call.write(good)
            got = []
            while len(got) < 5:
                step = await call.read()
                got += [from_wire(e, Emission) for e in step.emissions]
            assert [e.sampled.token for e in got if e.sampled] == split.oracle(request)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        async with grpc.aio.insecure_channel(split.prefill_members[0].address) as channel:
            job = pb.prefill.PrefillJob()
            job.segments.add(source="thin air")
            events = [event async for event in pb.prefill_rpc.PrefillStub(channel).Run(job)]
            assert events[-1].failed.reason == Reason.INVALID_REQUEST
        await split.idle()


async def test_after_a_prefill_worker_is_gone_its_channel_is_closed_and_its_landing_ends(
    tmp_path: Path, tiny_model: Path
) -> None:
    """The first token ended the request; the landing stays for the cache until the source has drained, or never will."""
    async with split_path(tmp_path, tiny_model, prefills=2) as split:
        pusher = split.prefills[0]._pusher
        grant = pusher.grant
        go = asyncio.Event()

        async def stuck(*args: Any, **more: Any) -> Any:
            landing = await grant(*args, **more)
            drain = landing.drain

            async def later() -> Any:
                await go.wait()
                return await drain()

            landing.drain = later
            return landing

        pusher.grant = stuck  # type: ignore[method-assign]
        answer = await split.gateway.ask(split.asker.request(ids(50), max_tokens=1))
        assert len(answer.ids) == 1
        assert split.stores["a"].numbers()["landings_open"] == 1
        split.crowd.tell(MemberChange(split.prefill_members[0], Liveness.SILENT, "frozen"))
        async with asyncio.timeout(2.0):
            while split.decode._filler._handoffs._channels:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        go.set()
        await split.idle()
