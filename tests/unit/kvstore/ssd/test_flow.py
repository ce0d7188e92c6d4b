"""Who may touch a buffer, until when, and in what order operations begin."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.ssd import SMALL, Faulty, key, put, read, right, slots, tier, writes

from moonpool.kvstore.ssd.blocks import Read, ReadEnd
from moonpool.kvstore.ssd.copying import Scratch
from moonpool.kvstore.ssd.flow import QUEUE, TURN, Flow, Kind, Op
from moonpool.kvstore.ssd.tier import SsdTier


@asynccontextmanager
async def stalled(folder: Path, n: int = 6) -> AsyncIterator[tuple[SsdTier, Faulty, dict[int, int]]]:
    """A tier of one thread whose disk answers no reads until ``gate`` is set."""
    io = Faulty()
    of = await tier(folder, io=io, ssd_threads=1)
    placed = {n: extent for i in range(n) for n, extent in (await put(of, SMALL, [i])).items()}
    io.gate.clear()
    try:
        yield of, io, placed
    finally:
        io.gate.set()
        await of.close()


async def test_a_read_that_has_not_begun_by_its_deadline_is_late_and_its_buffer_stays_as_it_was(tmp_path: Path) -> None:
    async with stalled(tmp_path) as (of, io, placed):
        inside = asyncio.create_task(right(of, SMALL, {0: placed[0]}))
        await asyncio.to_thread(io.inside.acquire)
        memory = slots(SMALL, 2)
        reads = [Read(placed[n], key(n), SMALL, into) for n, into in zip((2, 4), memory, strict=True)]
        assert await of.read(reads, 0.02) == [ReadEnd.LATE] * 2
        assert not inside.done()
        io.gate.set()
        assert await inside == {0}
        assert await right(of, SMALL, placed) == set(range(6))
        assert all((into == 0xFF).all() for into in memory)
        assert of.numbers()["ssd_reads_late"] == 2


async def test_a_read_that_has_begun_is_waited_for_and_counts(tmp_path: Path) -> None:
    async with stalled(tmp_path) as (of, io, placed):
        reading = asyncio.create_task(read(of, SMALL, {0: placed[0]}, deadline_s=0.02))
        await asyncio.to_thread(io.inside.acquire)
        await asyncio.sleep(0.05)  # past its deadline
        assert not reading.done()
        io.gate.set()
        (got,) = (await reading).values()
        assert not isinstance(got, ReadEnd)


async def test_no_read_begins_that_is_expected_to_end_too_late(tmp_path: Path) -> None:
    async with stalled(tmp_path) as (of, io, placed):
        slow = asyncio.create_task(right(of, SMALL, {0: placed[0]}))
        await asyncio.to_thread(io.inside.acquire)
        await asyncio.sleep(0.3)
        io.gate.set()
        assert await slow == {0}
        assert await read(of, SMALL, {1: placed[1]}, deadline_s=0.1) == {1: ReadEnd.LATE}
        assert await right(of, SMALL, {1: placed[1]}) == {1}  # with time enough it goes, and is fast
        for _ in range(30):
            await right(of, SMALL, {1: placed[1]})
            (got,) = (await read(of, SMALL, {2: placed[2]}, deadline_s=0.1)).values()
            if not isinstance(got, ReadEnd):
                return
        pytest.fail("one slow read was held against the disk for ever")


async def test_a_cancelled_read_ends_when_nobody_can_write_its_buffer_any_more(tmp_path: Path) -> None:
    async with stalled(tmp_path) as (of, io, placed):
        memory = slots(SMALL, 2)
        reads = [Read(placed[n], key(n), SMALL, into) for n, into in zip((0, 2), memory, strict=True)]
        reading = asyncio.create_task(of.read(reads, 60.0))
        await asyncio.to_thread(io.inside.acquire)
        for _ in range(3):
            reading.cancel()
            await asyncio.sleep(0.01)
        assert not reading.done()
        io.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        memory[0][:] = 7
        await right(of, SMALL, {1: placed[1]})
        assert (memory[0] == 7).all()
        assert (memory[1] == 0xFF).all()
        of.free(placed.values())
        assert of.room(SMALL) == 8 * 85, "no pin is left"


@pytest.mark.parametrize("turns", range(1, 6))
async def test_extents_of_a_cancelled_write_are_free_again(turns: int, tmp_path: Path) -> None:
    of = await tier(tmp_path)
    of.free((await put(of, SMALL, [100])).values())
    writing = asyncio.create_task(of.write(writes(SMALL, range(50))))
    for _ in range(turns):
        await asyncio.sleep(0)
    writing.cancel()
    try:
        of.free(extent for extent in await writing if extent is not None)  # it was done already
    except asyncio.CancelledError:
        pass
    assert of.room(SMALL) == 8 * 85
    await of.close()


async def test_closing_gives_up_what_is_queued_and_waits_for_what_is_inside(tmp_path: Path) -> None:
    async with stalled(tmp_path) as (of, io, placed):
        inside = asyncio.create_task(right(of, SMALL, {0: placed[0]}))
        await asyncio.to_thread(io.inside.acquire)
        queued = asyncio.create_task(read(of, SMALL, {2: placed[2]}))
        await asyncio.sleep(0)
        closing = asyncio.create_task(of.close())
        assert await queued == {2: ReadEnd.LATE}
        assert not closing.done()
        io.gate.set()
        assert await inside == {0}
        await closing
        assert await read(of, SMALL, {2: placed[2]}) == {2: ReadEnd.GONE}
        assert await of.write(writes(SMALL, [9])) == [None]


async def test_reads_go_first_and_moves_last_but_none_starves() -> None:
    flow, order = Flow(1, 0, {}, time.monotonic), []
    started, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(scratch: Scratch) -> None:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()

    first = Op(Kind.READ, 1, hold)
    flow.submit(first)
    await started.wait()
    ops = [Op(kind, 1, lambda scratch, kind=kind: order.append(kind)) for kind in (*[Kind.MOVE] * 3, *[Kind.WRITE] * 3)]
    ops += [Op(Kind.READ, 1, lambda scratch: order.append(Kind.READ)) for _ in range(3 * TURN)]
    for op in ops:
        flow.submit(op)
    go.set()
    await flow.settle(ops)
    assert order[:3] == [Kind.READ] * 3
    assert Kind.MOVE in order[: 2 * TURN]
    assert order.index(Kind.MOVE) < order.index(Kind.WRITE) <= len(order) - 3
    await flow.close()


async def test_a_bug_in_an_operation_is_raised_where_its_result_is_awaited() -> None:
    flow = Flow(1, 0, {}, time.monotonic)

    def broken(scratch: Scratch) -> None:
        raise ZeroDivisionError

    op = Op(Kind.READ, 1, broken)
    flow.submit(op)
    with pytest.raises(ZeroDivisionError):
        await flow.settle([op])
    await flow.close()


async def test_no_more_system_calls_run_at_once_than_allowed_while_others_check_blocks() -> None:
    flow = Flow(2, 3, {}, time.monotonic)
    inside, most = 0, 0
    lock, two, checking = threading.Lock(), threading.Barrier(2), threading.Barrier(5)

    def work(scratch: Scratch) -> None:
        nonlocal inside, most
        scratch.enter()
        with lock:
            inside += 1
            most = max(most, inside)
        two.wait(10)  # both may be inside at once
        with lock:
            inside -= 1
        scratch.leave()

    def check(scratch: Scratch) -> None:
        checking.wait(10)  # five threads in all

    for kind, job in ((Kind.READ, work), (Kind.WRITE, work), (Kind.WRITE, check)):
        ops = [Op(kind, 1, job) for _ in range(10)]
        for op in ops:
            flow.submit(op)
        await flow.settle(ops)
    assert most == 2
    await flow.close()


async def test_a_stalled_disk_gathers_a_bounded_queue() -> None:
    flow = Flow(1, 0, {}, time.monotonic)
    begun, go = threading.Event(), threading.Event()

    def stall(scratch: Scratch) -> bool:
        begun.set()
        return go.wait(10)

    first = Op(Kind.READ, 1, stall)
    flow.submit(first)
    await asyncio.to_thread(begun.wait)
    ops = [Op(Kind.READ, 1, lambda scratch: True) for _ in range(QUEUE + 5)]
    for op in ops:
        flow.submit(op)
    assert [op.future.done() for op in ops] == [False] * QUEUE + [True] * 5
    assert await flow.settle(ops[:QUEUE], until=time.monotonic()) == [None] * QUEUE
    assert flow.queued() == 0
    later = Op(Kind.READ, 1, lambda scratch: True)
    flow.submit(later)
    go.set()
    assert await flow.settle([first, later]) == [True, True]
    await flow.close()
