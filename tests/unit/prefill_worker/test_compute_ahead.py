"""Leading blocks are computed while those after them come from another node: real workers and store nodes over loopback."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.split import Split, split_path

from moonpool.core.config import TransferConfig
from moonpool.core.errors import DigestMismatch, TransferFailed
from moonpool.core.ids import NodeId
from moonpool.core.landing import SlotRef
from moonpool.core.placement import Segment, Source
from moonpool.core.request import Request, Sampled
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.fetching import Moved, PushOrder
from moonpool.kvstore.pusher import Pusher
from moonpool.prefill_worker.ahead import at_once
from moonpool.prefill_worker.chunk_planner import Chunk
from moonpool.prefill_worker.job import Job

SIZE = 16
FRONT, END = 4, 18  # of the prompt's 20 blocks, those to compute first, and where those that are fetched end
PROMPT = random.Random(3).choices(range(128), k=20 * SIZE + 5)
PLAN = (
    Segment(0, FRONT, Source.RECOMPUTE),
    Segment(FRONT, END - FRONT, Source.FETCH, NodeId("b"), move=True),
    Segment(END, 20 - END, Source.RECOMPUTE),
)


@dataclass
class Scene:
    """Node ``b`` holds the prompt; it pushes once ``gate`` is open. ``before`` runs on the compute thread before each chunk."""

    split: Split
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    before: Callable[[Job, Chunk], None] = lambda job, chunk: None
    chunks: list[tuple[int, int]] = field(default_factory=list)  # blocks, of the request that is measured

    def request(self) -> Request:
        return self.split.asker.request(PROMPT, max_tokens=4)

    async def right(self) -> int:
        """Ask once more, as planned: the answer must be what the whole prompt gives. Returns the cached tokens."""
        request = self.request()
        self.chunks.clear()
        answer = await self.split.gateway.ask(request)
        self.gate.set()
        await self.split.idle()
        assert answer.error is None
        assert answer.ids == self.split.oracle(request)
        return answer.cached_tokens

    def count(self, name: str) -> float:
        return self.split.prefills[0].numbers().get(f"{name}_count", 0)


@asynccontextmanager
async def scene(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, *, chunk: int = SIZE) -> AsyncIterator[Scene]:
    async with split_path(folder, model, nodes=("a", "b"), prefill_chunk=chunk) as split:
        made = Scene(split)
        await split.gateway.ask(made.request())
        await split.idle()
        await split.clear_device_pages()
        split.place(segments=PLAN)
        compute, fetcher = Job.compute, split.stores["b"].fetcher
        push = fetcher._push
        assert push is not None

        def watched(self: Job, chunk: Chunk) -> Sampled | None:
            made.before(self, chunk)
            done = compute(self, chunk)
            made.chunks.append((chunk.start // SIZE, chunk.end // SIZE))
            return done

        async def held_back(order: PushOrder) -> Moved:
            await made.gate.wait()
            return await push(order)

        monkeypatch.setattr(Job, "compute", watched)
        fetcher._push = held_back
        yield made


def wait_for_fetch(job: Job) -> None:
    deadline = time.monotonic() + 10
    while (coming := job.late or job.ahead) is not None and not coming.fetching.done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("chunk", [SIZE, 3 * SIZE, 100 * SIZE])
async def test_what_is_computed_and_what_is_fetched_meet_at_the_border(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch, chunk=chunk) as s:
        s.gate.set()
        s.before = lambda job, _: wait_for_fetch(job)
        assert await s.right() == (END - FRONT) * SIZE
        computed = [block for first, end in s.chunks for block in range(first, end)]
        assert computed == [*range(FRONT), *range(END, 20)]
        assert (s.count("fetched_ahead_tokens"), s.count("fetched_late_tokens")) == ((END - FRONT) * SIZE, 0)
        assert s.split.stores["b"].numbers()["cooled"] == END, "the placement said move"
        await s.split.clear_device_pages()
        s.split.place(segments=())
        assert await s.right() == 0, "the blocks before those that node a fetched were never there"


async def test_a_late_fetch_gives_what_is_not_computed_yet(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        loop = asyncio.get_running_loop()

        def before(job: Job, chunk: Chunk) -> None:
            if chunk.start == 9 * SIZE:
                loop.call_soon_threadsafe(s.gate.set)
                wait_for_fetch(job)

        s.before = before
        assert await s.right() == (END - 10) * SIZE
        assert [first for first, _ in s.chunks] == [*range(10), 18, 19, 20]
        assert (s.count("fetched_ahead_tokens"), s.count("fetched_late_tokens")) == (8 * SIZE, 6 * SIZE)


@pytest.mark.parametrize("how", ["never", "fails"])
async def test_a_fetch_that_does_not_come_costs_nothing_but_the_computing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        if how == "fails":
            fetcher = s.split.stores["b"].fetcher

            async def failing(order: PushOrder) -> Moved:
                await fetcher._drain(order.landing, order.target_address)
                raise TransferFailed("the link is cut")

            fetcher._push = failing
        async with asyncio.timeout(4):
            assert await s.right() == 0
        assert [first for first, _ in s.chunks] == list(range(21))
        assert s.count("fetched_ahead_tokens") == 0


async def test_behind_a_slow_line_both_halves_are_used(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk takes 30 ms; the line needs about 0.25 s for the blocks that are fetched, eight chunks' time."""
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        store = s.split.stores["b"]
        rate = (END - FRONT) * s.split.decode_engine.layout.block_bytes / 0.25
        pusher = Pusher(
            store.member, store.layout, store.regions.views, TransferConfig(carrier="tcp", throttle_bytes_per_s=rate)
        )

        async def push(order: PushOrder) -> Moved:
            drained = await pusher.push_blocks(order.landing, order.targets, order.target_address, order.layout, order.blocks)
            return Moved(drained.bytes_sent, drained.carrier)

        store.fetcher._push = push
        s.before = lambda job, chunk: time.sleep(0.03)
        try:
            cached = await s.right()
        finally:
            await pusher.close()
        assert 0 < cached == s.count("fetched_ahead_tokens") < (END - FRONT) * SIZE
        assert len(s.chunks) < 20
        assert s.count("fetched_bytes") > 0


@pytest.mark.parametrize("bad", [FRONT, FRONT + 5, END - 1])
async def test_a_fetched_block_that_went_bad_is_computed_with_all_after_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        s.gate.set()
        s.before = lambda job, _: wait_for_fetch(job)
        read, key = WorkerStore.read_slice, s.request().keys[bad]

        def spoiled(self: WorkerStore, slot: SlotRef, layer: int, into: Any, valid: int) -> None:
            if slot.key == key and layer == 1 and threading.current_thread().name.startswith("prefix load"):
                raise DigestMismatch("spoiled")
            read(self, slot, layer, into, valid)

        monkeypatch.setattr(WorkerStore, "read_slice", spoiled)
        assert await s.right() == (bad - FRONT) * SIZE
        assert s.count("prefix_blocks_lost") == END - bad
        assert s.split.stores["a"].numbers()["quarantined"] > 0


async def test_clients_that_leave_while_blocks_come_in_leave_nothing_behind(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        s.before = lambda job, chunk: time.sleep(0.01)
        for at in range(6):
            request = s.request()
            s.split.gateway.begin(request)
            await asyncio.sleep(0.02 * at)
            s.split.decode.cancel(s.split.gateway.stream, request.id, 1)
        s.gate.set()
        await s.split.idle(5.0)


WHOLE = (Segment(0, 20, Source.FETCH, NodeId("b")),)


async def test_what_a_frozen_source_should_have_sent_is_computed_before_the_fetch_is_given_up(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        s.split.place(segments=WHOLE)
        hanging: list[bool] = []
        s.before = lambda job, _: hanging.append(job.late is not None and not job.late.fetching.done())
        assert await s.right() == 0
        assert [first for first, _ in s.chunks] == list(range(21))
        assert hanging[0], "computing began while the fetch was still waited for"
        assert (s.count("late_fetches"), s.count("fetched_ahead_tokens")) == (1, 0)


async def test_an_unplanned_late_fetch_gives_what_is_not_computed_yet(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        s.split.place(segments=WHOLE)
        loop = asyncio.get_running_loop()

        def before(job: Job, chunk: Chunk) -> None:
            if chunk.start == 2 * SIZE:
                loop.call_soon_threadsafe(s.gate.set)
                wait_for_fetch(job)

        s.before = before
        cached = await s.right()
        assert s.count("late_fetches") == 1
        assert cached == s.count("fetched_ahead_tokens") == (20 - 3) * SIZE
        assert [first for first, _ in s.chunks] == [0, 1, 2, 20]


async def test_clients_that_leave_while_late_blocks_come_in_leave_nothing_behind(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, tiny_model, monkeypatch) as s:
        s.split.place(segments=WHOLE)
        s.before = lambda job, chunk: time.sleep(0.01)
        for at in range(6):
            request = s.request()
            s.split.gateway.begin(request)
            await asyncio.sleep(0.1 * at)
            s.split.decode.cancel(s.split.gateway.stream, request.id, 1)
        s.gate.set()
        await s.split.idle(5.0)


def test_a_plan_for_who_cannot_do_both_fetches_both() -> None:
    reuse = Segment(0, 2, Source.REUSE)
    plan = (
        reuse,
        Segment(2, 3, Source.RECOMPUTE),
        Segment(5, 4, Source.FETCH, NodeId("b"), True),
        Segment(9, 1, Source.RECOMPUTE),
    )
    assert at_once(plan) == (reuse, Segment(2, 7, Source.FETCH, NodeId("b"), True), Segment(9, 1, Source.RECOMPUTE))
    assert at_once(()) == ()
