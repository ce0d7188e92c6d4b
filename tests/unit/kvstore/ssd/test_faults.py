"""A disk that fails: nothing raises, nothing wrong is read, what can go on goes on."""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.ssd import NODE, OTHER, SMALL, Fault, Faulty, Short, flip, found, key, keys, put, read, right, stored, tier, writes

from moonpool.core.config import MIB
from moonpool.kvstore.ssd.blocks import ReadEnd
from moonpool.kvstore.ssd.format import HEADER_BYTES, extent_bytes


async def test_where_less_can_be_allocated_the_tier_is_smaller_and_says_so(tmp_path: Path) -> None:
    io = Faulty()
    io.room = 3 * MIB + MIB // 2
    of = await tier(tmp_path, io=io)
    assert of.numbers()["ssd_bytes"] == 3 * MIB
    assert "3 MiB in 3 segments, of 8 MiB" in of.words()["ssd_size"]
    assert "No space left" in of.words()["ssd_notes"]
    placed = await put(of, SMALL, range(of.room(SMALL)))
    assert await right(of, SMALL, placed) == set(range(3 * 85))
    assert await of.write(writes(SMALL, [1])) == [None]
    await of.close()


async def test_the_last_segment_is_a_smaller_one_where_a_whole_one_does_not_fit(tmp_path: Path) -> None:
    io = Faulty()
    io.room = 11 * MIB
    of = await tier(tmp_path, io=io, ssd_bytes=64 * MIB)
    assert of.numbers()["ssd_bytes"] == 11 * MIB  # 8, 2, 1
    placed = await put(of, SMALL, range(of.room(SMALL)))
    await of.close()
    io.room = 1 << 40
    again = await tier(tmp_path, io=io, ssd_bytes=64 * MIB)
    assert set(found(again)) == keys(placed)
    await again.close()


async def test_where_space_cannot_be_set_aside_the_files_are_sparse_and_a_full_disk_shows_at_a_write(tmp_path: Path) -> None:
    io = Faulty()
    io.allocates = False
    of = await tier(tmp_path, io=io)
    assert "not set aside" in of.words()["ssd_size"]
    placed = await put(of, SMALL, range(20))
    io.write = lambda fd, n, size, offset: errno.ENOSPC
    assert await of.write(writes(SMALL, [50])) == [None]
    assert await right(of, SMALL, placed) == set(range(20))
    await of.close()
    again = await tier(tmp_path, io=io)
    assert set(found(again)) == keys(range(20))
    await again.close()


async def test_a_full_disk_at_start_leaves_a_tier_without_room(tmp_path: Path) -> None:
    io = Faulty()
    io.room = 0
    of = await tier(tmp_path, io=io)
    assert of.room(SMALL) == 0
    assert await of.write(writes(SMALL, [1])) == [None]
    assert of.words()["ssd_size"].startswith("0 MiB")
    await of.close()


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, Short(100), Short(HEADER_BYTES)])
async def test_one_write_in_twenty_fails_and_no_block_of_it_is_found(fault: int | Short, tmp_path: Path) -> None:
    io, rng = Faulty(), random.Random(7)
    io.write = lambda fd, n, size, offset: fault if size > HEADER_BYTES and rng.random() < 0.05 else None
    of = await tier(tmp_path, io=io)
    placed: dict[int, int] = {}
    failed = set()
    for n in range(120):
        (extent,) = await of.write(writes(SMALL, [n]))
        if extent is None:
            failed.add(n)
        else:
            placed[n] = extent
    assert failed
    assert await right(of, SMALL, placed) == set(placed)
    assert of.numbers()["ssd_write_errors"] > 0
    await of.close()
    again = await tier(tmp_path)
    assert set(found(again)) == keys(placed)
    await again.close()


async def test_a_segment_with_a_failed_write_takes_no_more_and_several_end_writing(tmp_path: Path) -> None:
    io = Faulty()
    of = await tier(tmp_path, io=io)
    placed = await put(of, SMALL, range(30))
    io.write = lambda fd, n, size, offset: errno.EIO if size > HEADER_BYTES else None
    room = of.room(SMALL)
    for failed in range(1, 3):
        assert await of.write(writes(SMALL, [100])) == [None]
        assert of.room(SMALL) < room
        assert of.numbers()["ssd_segments_retired"] == failed
        assert "take no more writes" in of.words()["ssd"]
    assert await of.write(writes(SMALL, [100])) == [None]
    io.write = lambda fd, n, size, offset: None
    assert of.room(SMALL) == 0
    assert "read-only" in of.words()["ssd"]
    assert await of.write(writes(SMALL, [100])) == [None]
    assert await right(of, SMALL, placed) == set(range(30))
    await of.close()


async def test_a_header_that_cannot_be_written_does_not_hand_out_the_segment(tmp_path: Path) -> None:
    io = Faulty()
    of = await tier(tmp_path, io=io)
    io.write = lambda fd, n, size, offset: errno.EIO
    assert await of.write(writes(SMALL, range(3))) == [None] * 3
    assert "read-only" in of.words()["ssd"]
    await of.close()


@pytest.mark.parametrize("fault", [errno.EIO, Short(HEADER_BYTES + 100), Short(0)])
async def test_a_block_that_cannot_be_read_costs_itself_alone(fault: int | Short, tmp_path: Path) -> None:
    io = Faulty()
    of = await tier(tmp_path, io=io, ssd_threads=1)
    lost: list[int] = []
    of.on_lost = lost.extend
    placed = await put(of, SMALL, range(12))
    _, bad, one = stored(tmp_path, SMALL, placed[5])
    io.read = _touching(bad, one, fault)
    got = await read(of, SMALL, placed)
    assert got[5] is ReadEnd.GONE
    assert {n for n, end in got.items() if not isinstance(end, ReadEnd)} >= set(range(5))
    if not isinstance(fault, Short):
        assert lost == [placed[5]]
        assert of.numbers()["ssd_read_errors"] > 0
    io.read = lambda fd, n, size, offset: None
    assert await read(of, SMALL, {5: placed[5]}) == {5: ReadEnd.GONE}
    await of.close()


def _touching(bad: int, one: int, fault: int | Short) -> Fault:
    """Calls that reach into the bytes from ``bad`` on fail; a short one ends inside them."""

    def ask(fd: int, n: int, size: int, offset: int) -> int | Short | None:
        if size <= HEADER_BYTES or not offset < bad + one <= offset + size:
            return None
        return Short(bad - offset + fault.size) if isinstance(fault, Short) else fault

    return ask


async def test_a_removed_file_costs_its_blocks_and_a_new_one_takes_its_place(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    lost: list[int] = []
    of.on_lost = lost.extend
    placed = await put(of, SMALL, range(200))
    room = of.room(SMALL)
    path, *_ = stored(tmp_path, SMALL, placed[0])
    path.unlink()
    mine = {n for n, e in placed.items() if stored(tmp_path, SMALL, e)[0] == path}
    assert await right(of, SMALL, placed) == set(range(200)) - mine
    assert sorted(lost) == sorted(placed[n] for n in mine)
    assert of.numbers()["ssd_segments_lost"] == 1
    await of.quiet()
    assert of.room(SMALL) == room + len(mine)
    again = await put(of, SMALL, range(300, 300 + of.room(SMALL)))
    assert set(again.values()).isdisjoint(placed.values()) or len(mine) == 85
    assert await right(of, SMALL, again) == set(again)
    await of.close()
    after = await tier(tmp_path)
    assert set(found(after)) == keys(set(placed) - mine) | keys(again)
    await after.close()


async def test_a_block_lost_before_its_write_is_answered_is_not_reported_as_written(tmp_path: Path) -> None:
    io = Faulty()
    of = await tier(tmp_path, SMALL, OTHER, io=io)
    placed = await put(of, SMALL, [9])
    begun, go = threading.Event(), threading.Event()

    def hold(fd: int, n: int, size: int, offset: int) -> None:
        if size >= extent_bytes(OTHER):
            begun.set()
            go.wait()

    io.write = hold
    writing = asyncio.create_task(of.write(writes(SMALL, [1]) + writes(OTHER, [2])))
    await asyncio.to_thread(begun.wait)
    stored(tmp_path, SMALL, placed[9])[0].unlink()
    assert await read(of, SMALL, placed) == {9: ReadEnd.GONE}
    go.set()
    small, other = await writing
    assert small is None
    assert other is not None
    await of.close()


async def test_a_removed_folder_costs_all_blocks_and_the_tier_begins_anew(tmp_path: Path) -> None:
    of = await tier(tmp_path, SMALL, OTHER)
    lost: list[int] = []
    of.on_lost = lost.extend
    placed = await put(of, SMALL, range(100))
    room = of.room(SMALL) + 100
    shutil.rmtree(tmp_path / NODE)
    assert await of.write(writes(SMALL, [500])) == [None]
    assert set(lost) >= set(placed.values())
    await of.quiet()
    assert of.room(SMALL) == room
    again = await put(of, SMALL, range(50))
    assert await right(of, SMALL, again) == set(range(50))
    with pytest.raises(Exception, match="in use by another process"):
        await tier(tmp_path)
    await of.close()
    after = await tier(tmp_path)
    assert set(found(after)) == keys(range(50))
    await after.close()


async def test_a_removed_folder_that_another_process_took_stays_its(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    placed = await put(of, SMALL, range(10))
    shutil.rmtree(tmp_path / NODE)
    other = await tier(tmp_path)
    assert await right(of, SMALL, placed) == set()
    await of.quiet()
    assert "could not be made again" in of.words()["ssd_notes"]
    assert of.room(SMALL) == 0
    assert await put(other, SMALL, range(5))
    await of.close()
    await other.close()


@pytest.mark.parametrize("left", [0, HEADER_BYTES, 30 * (HEADER_BYTES + SMALL.slot_bytes)])
async def test_a_cut_file_is_lost_as_a_whole(left: int, tmp_path: Path) -> None:
    of = await tier(tmp_path)
    lost: list[int] = []
    of.on_lost = lost.extend
    placed = await put(of, SMALL, range(50))
    path, *_ = stored(tmp_path, SMALL, placed[0])
    with path.open("r+b") as file:
        file.truncate(left)
    assert await right(of, SMALL, placed) == set()
    assert sorted(lost) == sorted(placed.values())
    await of.quiet()
    assert of.room(SMALL) == 8 * 85
    await of.close()


async def test_files_vanish_while_blocks_are_read_and_written(tmp_path: Path) -> None:
    """The listener keeps what the tier says is there; nothing it still believes in reads wrong, and the tier never stops."""
    of = await tier(tmp_path, ssd_threads=4)
    held: dict[int, int] = {}

    def on_lost(extents: Sequence[int]) -> None:
        gone = set(extents)
        for n in [n for n, e in held.items() if e in gone]:
            del held[n]

    of.on_lost = on_lost
    rng = random.Random(3)
    for step in range(60):
        if step % 12 == 5:
            files = sorted((tmp_path / NODE).glob("segment-*"))
            for path in rng.sample(files, min(1, len(files))):
                path.unlink(missing_ok=True)
        if step == 40:
            shutil.rmtree(tmp_path / NODE)
        names = list(range(step * 20, step * 20 + 20))
        wrote, _ = await asyncio.gather(
            of.write(writes(SMALL, names)),
            right(of, SMALL, dict(rng.sample(sorted(held.items()), min(20, len(held))))),
        )
        held.update((n, e) for n, e in zip(names, wrote, strict=True) if e is not None)
        if of.room(SMALL) < 40:
            for n in sorted(held)[:60]:
                of.free([held.pop(n)])
    assert of.numbers()["ssd_segments_lost"] >= 8
    assert await right(of, SMALL, dict(held)) <= set(held)
    await of.close()


async def test_an_erasure_that_the_disk_refuses_removes_the_whole_file(tmp_path: Path) -> None:
    io = Faulty()
    of = await tier(tmp_path, io=io)
    placed = await put(of, SMALL, range(5))
    io.write = lambda fd, n, size, offset: errno.EIO if size == HEADER_BYTES else None
    await of.erase([placed[2]])
    assert of.numbers()["ssd_erase_failed"] == 1
    await of.close()
    again = await tier(tmp_path)
    assert key(2) not in found(again)
    await again.close()


async def test_a_wrong_header_that_cannot_be_written_over_costs_no_other_block(tmp_path: Path) -> None:
    io = Faulty()
    of = await tier(tmp_path, io=io)
    placed = await put(of, SMALL, range(5))
    flip(tmp_path, SMALL, placed[2], HEADER_BYTES + 5)
    io.write = lambda fd, n, size, offset: errno.EIO
    assert await read(of, SMALL, {2: placed[2]}) == {2: ReadEnd.TORN}
    await of.quiet()
    assert of.numbers()["ssd_segments_retired"] == 1
    assert await right(of, SMALL, placed) == {0, 1, 3, 4}
    await of.close()


async def test_closing_does_not_wait_for_bandwidth_and_still_erases(tmp_path: Path) -> None:
    of = await tier(tmp_path, ssd_write_bytes_per_s=1.0)
    first = asyncio.create_task(of.write(writes(SMALL, [1])))  # the header of its segment uses the bandwidth of an hour
    await asyncio.sleep(0.05)
    assert not first.done()
    await of.close()
    assert await first == [None]
    of = await tier(tmp_path)
    placed = await put(of, SMALL, range(5))
    await of.close()
    of = await tier(tmp_path, ssd_write_bytes_per_s=1.0)
    await of.erase([])
    erasing = [asyncio.create_task(of.erase([placed[n]])) for n in (1, 2)]
    await asyncio.sleep(0.05)
    await of.close()
    await asyncio.gather(*erasing)
    again = await tier(tmp_path)
    assert set(found(again)).isdisjoint(keys([1, 2]))
    await again.close()
