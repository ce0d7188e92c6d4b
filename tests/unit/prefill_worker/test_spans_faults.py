"""The worker before is lost, late or refuses: its blocks are computed, no attempt is, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.groups import SIZE, Halt, answered, check, count, group, ids
from support.split import Split
from support.store import until
from support.workers import Answer, member, ref

from moonpool.core.errors import DigestMismatch, PeerSilent, Reason
from moonpool.core.ids import MemberId, RequestId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, MemberChange
from moonpool.core.placement import Helper, Placement
from moonpool.kvstore.client import WorkerStore
from moonpool.prefill_worker import pace
from moonpool.prefill_worker.span_load import SpanLoad
from moonpool.prefill_worker.spans import Spans

PROMPT = ids(20 * SIZE + 5, 7)
ENDS = [12]


class Lost:
    """The ways to lose the first worker while it stands before its last layer."""

    def __init__(self, split: Split, halt: Halt) -> None:
        self.split, self.halt = split, halt

    async def breaks(self) -> None:
        self.halt.go(breaks=True)

    async def silent(self) -> None:
        change = MemberChange(self.split.prefill_members[0], Liveness.SILENT, "frozen")
        self.split.crowd.tell(change)

    async def leaves(self) -> None:
        worker = self.split.prefills[0]
        worker.give_back(worker.held()[0])

    async def cut_off(self) -> None:
        """The call breaks, as where its process is killed."""
        for channel in self.split.prefills[1]._handoffs._channels.values():
            await channel.close()
        self.split.prefills[1]._handoffs._channels.clear()

    async def landing_lost(self) -> None:
        """The store node between the two ends the session of the second one."""
        store = self.split.stores["b"]
        for session in list(store.sessions):
            store.sessions.end(session, "the test cuts it")

    async def late(self) -> None:
        """It goes on standing there."""


async def test_blocks_of_a_worker_that_is_lost_amid_its_span_are_computed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SPAN_FLOOR_S", 0.4)
    async with group(tmp_path, tiny_model) as split:
        split.place(1, ends=ENDS)
        halt = Halt(split.prefill_engines[0])
        lost = Lost(split, halt)
        faults: list[Callable[[], Awaitable[None]]] = [lost.breaks, lost.silent, lost.leaves, lost.cut_off, lost.late]
        for number, fault in enumerate([*faults, lost.landing_lost]):
            name = fault.__name__
            halt.arm()
            for node in "abc":
                split.stores[node].pool.clear()
            await split.clear_device_pages()
            request = split.asker.request(PROMPT)
            answer = split.gateway.begin(request)
            await until(lambda: _came(split) > 0, f"{name}: nothing came")
            await fault()
            await asyncio.wait_for(answer.over.wait(), 10)
            halt.go()
            assert answer.error is None, f"{name}: {answer.error}"
            split.crowd.tell(MemberChange(split.prefill_members[0], Liveness.LIVE))
            await until(lambda: split.prefills[1].numbers()["store_connected"] > 0, name)
            await split.idle(5.0)
            check(split, request, answer)
            assert count(split, 1, "spans_alone") == number + 1, name
            assert count(split, 1, "span_tokens") == 0, name


def _came(split: Split) -> int:
    spans = [work.span for work in split.prefills[1]._jobs.values() if work.span is not None]
    return sum(span.came for span in spans)


async def test_pages_are_written_again_only_once_nothing_is_sent_out_of_them(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model) as split:
        split.place(1)
        await answered(split, split.asker.request(ids(2 * SIZE, 1)))  # its senders are made
        split.place(1, ends=ENDS)
        sending = Sending(split.prefills[1]._pusher._senders.values())
        halt, engine = Halt(split.prefill_engines[0]), split.prefill_engines[1]
        forward, begun = engine.forward, list[int]()

        def watched(*args: Any, **more: Any) -> Any:
            begun.append(sending.posted)
            return forward(*args, **more)

        engine.forward = watched  # type: ignore[method-assign]
        request = split.asker.request(PROMPT)
        answer = split.gateway.begin(request)
        await until(lambda: sending.posted > 0, "nothing of what came was sent on")
        halt.go(breaks=True)
        await until(lambda: any(work.span and work.span.over for work in split.prefills[1]._jobs.values()), "not given up")
        asyncio.get_running_loop().call_later(0.1, sending.end)
        await asyncio.wait_for(answer.over.wait(), 10)
        check(split, request, answer)
        assert len(begun) > 1 and not any(begun)
        await split.idle()


class Sending:
    """Pushes whose end is not told until ``end``; ``posted`` of them are waited for."""

    def __init__(self, senders: Iterable[Any]) -> None:
        self._ends: list[Callable[[], None]] = []
        self._through = False
        for sender in senders:
            sender.push = partial(self._push, sender.push)

    @property
    def posted(self) -> int:
        return len(self._ends)

    def end(self) -> None:
        self._through = True
        ends, self._ends = self._ends, []
        for each in ends:
            each()

    def _push(self, push: Callable[..., Future[None]], *parts: Any) -> Future[None]:
        done: Future[None] = push(*parts)
        if self._through:
            return done
        held: Future[None] = Future()
        self._ends.append(lambda: done.add_done_callback(lambda _: held.set_result(None)))
        return held


async def test_a_worker_that_takes_nothing_or_waits_for_us_is_not_waited_for_long(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "SPAN_FLOOR_S", 0.2)
    async with group(tmp_path, tiny_model) as split:
        split.place(1, ends=ENDS)
        split.prefills[0]._leaving = True
        request = split.asker.request(PROMPT)
        check(split, request, await answered(split, request))
        split.prefills[0]._leaving = False
        # Two groups whose workers are one another's.
        first, second = (ref(member) for member in split.prefill_members)
        requests = [split.asker.request(ids(15 * SIZE + 1, seed)) for seed in (1, 2)]
        answers: list[Answer] = []
        for request, prefill, helper in zip(requests, (first, second), (second, first), strict=True):
            split.gateway.placement = Placement(prefill, ref(split.decode_member), helpers=(Helper(helper, 8),))
            answers.append(split.gateway.begin(request))
        for request, answer in zip(requests, answers, strict=True):
            await asyncio.wait_for(answer.over.wait(), 10)
            assert answer.error is None
            check(split, request, answer)
        await split.idle()


async def test_a_chain_goes_on_without_the_first_of_three(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model, 3) as split:
        split.place(2, ends=[6, 13])
        halt = Halt(split.prefill_engines[0])
        request = split.asker.request(PROMPT)
        answer = split.gateway.begin(request)
        await until(halt.there.is_set, "it never came to its last layer")
        halt.go(breaks=True)
        await asyncio.wait_for(answer.over.wait(), 10)
        await split.idle()
        assert answer.error is None
        check(split, request, answer)
        assert count(split, 1, "spans_alone") == 1


async def test_an_end_of_the_attempt_reaches_every_worker_of_the_chain(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model, 3) as split:
        split.place(2, ends=[6, 13])
        halt = Halt(split.prefill_engines[0])
        for end in ("cancelled", "late"):
            halt.arm()
            request = split.asker.request(PROMPT, name=end)
            answer = split.gateway.begin(request, deadline_ms=60_000 if end == "cancelled" else 700)
            await until(halt.there.is_set, end)
            if end == "cancelled":
                split.decode.cancel(split.gateway.stream, request.id, 1)
            await asyncio.wait_for(answer.over.wait(), 10)
            assert end == "cancelled" or (answer.error is not None and answer.error.reason is Reason.DEADLINE)
            await until(lambda: all(worker._jobs == {} for worker in split.prefills[1:]), "the others do not wait for it")
            halt.go()
            await split.idle()
            assert not any(len(worker._handoffs) for worker in split.prefills)
            await split.clear_device_pages()
        request = split.asker.request(PROMPT)
        check(split, request, await answered(split, request))


async def test_without_time_to_compute_its_blocks_the_lost_worker_is_named(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model) as split:
        split.place(1, ends=ENDS)
        halt = Halt(split.prefill_engines[0])
        split.prefills[1]._runner.pace.measured(1, 10.0)  # seconds a token
        answer = split.gateway.begin(split.asker.request(PROMPT))
        await until(halt.there.is_set, "it never came to its last layer")
        split.crowd.tell(MemberChange(split.prefill_members[0], Liveness.GONE, "killed"))
        await asyncio.wait_for(answer.over.wait(), 10)
        halt.go()
        assert answer.error is not None
        assert (answer.error.reason, answer.error.peer) == (Reason.PEER_SILENT, "prefill-0")
        await split.idle()


async def test_a_worker_before_that_cannot_be_asked_is_named_where_there_is_no_time_to_do_without(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(tmp_path, tiny_model) as split:
        split.place(1, ends=ENDS)

        def refuse(*_: object, **__: object) -> None:
            raise PeerSilent("no session with the store node of b", peer="store-b")

        monkeypatch.setattr(split.prefills[1]._handoffs, "begin", refuse)
        request = split.asker.request(PROMPT)
        check(split, request, await answered(split, request))
        await split.clear_device_pages()
        for store in split.stores.values():
            store.pool.clear()
        split.prefills[1]._runner.pace.measured(1, 1_000.0)  # seconds a token
        computed = count(split, 1, "prefix_tokens_computed")
        answer = split.gateway.begin(split.asker.request(PROMPT))
        await asyncio.wait_for(answer.over.wait(), 10)
        assert answer.error is not None
        assert (answer.error.reason, answer.error.peer) == (Reason.PEER_SILENT, "store-b")
        assert count(split, 1, "spans_alone") == 2 and count(split, 1, "prefix_tokens_computed") == computed
        await split.idle()


async def test_a_slice_that_is_bad_where_it_landed_is_no_longer_found_and_computed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(tmp_path, tiny_model) as split:
        split.place(1, ends=ENDS)
        read, left = WorkerStore.read_slice, [17]

        def flipping(self: WorkerStore, slot: Any, layer: int, into: Any, valid: int) -> None:
            here = self is split.prefills[1]._handoffs.link.client
            left[0] -= here
            if here and left[0] == 0:
                raise DigestMismatch(f"layer {layer}")
            read(self, slot, layer, into, valid)

        monkeypatch.setattr(WorkerStore, "read_slice", flipping)
        request = split.asker.request(PROMPT)
        answer = await answered(split, request)
        check(split, request, answer)
        assert count(split, 1, "spans_alone") == 1
        assert split.stores["b"].numbers()["digest_mismatches_landing_copy"] == 1


async def test_a_job_that_waits_for_what_is_worth_it_counts_as_one_that_goes_on() -> None:
    """However long that is: else its process would be ended as one that stands still."""
    layout = KVLayout("m", 2, 1, 16, "float32", SIZE)
    handoffs: Any = SimpleNamespace(over=lambda name: None)
    load = SpanLoad(0, 2, layout.layers, handoffs, (RequestId("r"), 1), MemberId("before"))
    spans, told = Spans(member("p", Role.PREFILL, layout), layout, handoffs, pace.Pace(), Counter()), asyncio.Event()
    work: Any = SimpleNamespace(tokens=range(3 * SIZE), went_on=told.set)
    watching = asyncio.create_task(spans._watch(work, load))
    for _ in range(2):
        await asyncio.wait_for(told.wait(), 10)
        told.clear()
    load.release()
    await asyncio.wait_for(watching, 10)
    assert load.failure is None
