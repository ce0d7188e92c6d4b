"""Room for one layout out of the scattered free extents of another."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.ssd import OTHER, SMALL, Faulty, flip, found, key, keys, put, read, right, tier, writes

from moonpool.kvstore.ssd.blocks import ReadEnd
from moonpool.kvstore.ssd.format import HEADER_BYTES
from moonpool.kvstore.ssd.tier import SsdTier


class Holder:
    """Keeps what a pool keeps: where each block lies, by what the tier tells."""

    def __init__(self, of: SsdTier) -> None:
        self.of = of
        self.at: dict[int, int] = {}
        of.on_moved, of.on_lost = self.moved, self.lost
        self.moves = 0

    def moved(self, moved: Mapping[int, int]) -> None:
        self.moves += len(moved)
        self.at = {n: moved.get(e, e) for n, e in self.at.items()}

    def lost(self, extents: Sequence[int]) -> None:
        self.at = {n: e for n, e in self.at.items() if e not in extents}


async def scattered(folder: Path, io: Faulty | None = None) -> tuple[SsdTier, Holder]:
    """A tier full of small blocks, every other one of them freed."""
    of = await tier(folder, SMALL, OTHER, io=io)
    holder = Holder(of)
    holder.at = await put(of, SMALL, range(of.room(SMALL)))
    for n in [n for n in holder.at if n % 2]:
        of.free([holder.at.pop(n)])
    return of, holder


async def test_a_segment_is_emptied_and_given_to_the_layout_that_needs_it(tmp_path: Path) -> None:
    of, holder = await scattered(tmp_path)
    assert of.room(OTHER) == 0
    old = dict(holder.at)
    assert await of.compact(OTHER) == of.room(OTHER) == 31
    assert holder.moves == len(set(old.values()) - set(holder.at.values())) == 42
    other = await put(of, OTHER, range(31))
    assert await right(of, SMALL, holder.at) == set(old)
    assert await right(of, OTHER, other) == set(other)
    assert of.numbers()["ssd_blocks_moved"] == 42
    await of.close()
    again = await tier(tmp_path, SMALL, OTHER)
    assert {k for k, e in found(again).items() if e in set(holder.at.values())} == keys(old)
    assert found(again, OTHER) == {key(n): e for n, e in other.items()}
    await again.close()


async def test_it_goes_on_until_no_segment_can_be_emptied(tmp_path: Path) -> None:
    of, holder = await scattered(tmp_path)
    while await of.compact(OTHER):
        pass
    assert of.room(OTHER) == 3 * 31 + 31  # half of eight segments, less what a single free block keeps
    assert await right(of, SMALL, holder.at) == set(holder.at)
    assert await of.compact(OTHER) == 0
    await of.close()


async def test_a_write_that_lacks_room_starts_it_and_does_not_wait(tmp_path: Path) -> None:
    of, holder = await scattered(tmp_path)
    assert await of.write(writes(OTHER, range(3))) == [None] * 3
    await of.quiet()
    await put(of, OTHER, range(3))
    assert await right(of, SMALL, holder.at) == set(holder.at)
    await of.close()


async def test_a_reader_that_still_has_the_old_place_finds_the_block(tmp_path: Path) -> None:
    of, holder = await scattered(tmp_path)
    old = dict(holder.at)
    while await of.compact(OTHER):
        pass
    assert old != holder.at
    assert await right(of, SMALL, old) == set(old)
    n = next(n for n in old if old[n] != holder.at[n])
    of.free([old[n]])
    assert await read(of, SMALL, {n: holder.at[n]}) == {n: ReadEnd.GONE}
    await of.close()


async def test_a_block_that_is_being_read_stays_until_it_is_read(tmp_path: Path) -> None:
    io = Faulty()
    of, holder = await scattered(tmp_path, io)
    old = dict(holder.at)
    io.gate.clear()
    reading = asyncio.create_task(right(of, SMALL, {n: old[n] for n in range(0, 40, 20)}))
    await asyncio.to_thread(io.inside.acquire)
    compacting = asyncio.create_task(of.compact(OTHER))
    await asyncio.sleep(0.02)
    io.gate.set()
    assert await reading == {0, 20}
    await compacting
    assert await right(of, SMALL, holder.at) == set(old)
    await of.close()


async def test_a_bad_block_is_dropped_on_the_way_and_not_copied(tmp_path: Path) -> None:
    of, holder = await scattered(tmp_path)
    n, extent = next((n, e) for n, e in holder.at.items() if e >> 20 == 1)  # the emptiest segment, by one block
    flip(tmp_path, SMALL, extent, HEADER_BYTES + 50)
    await of.compact(OTHER)
    assert n not in holder.at
    assert of.numbers()["ssd_mismatches_move"] == 1
    assert await right(of, SMALL, holder.at) == set(holder.at)
    await of.close()


async def test_a_disk_that_refuses_copies_loses_no_block(tmp_path: Path) -> None:
    io = Faulty()
    of, holder = await scattered(tmp_path, io)
    before = dict(holder.at)
    io.write = lambda fd, n, size, offset: errno.EIO if size > HEADER_BYTES else None
    assert await of.compact(OTHER) == 0
    io.write = lambda fd, n, size, offset: None
    assert set(holder.at) == set(before)
    assert await right(of, SMALL, holder.at) == set(before)
    await of.close()


def held(io: Faulty) -> tuple[threading.Event, threading.Event]:
    """From now on writes of blocks say that they have begun, and wait to be let go."""
    begun, go = threading.Event(), threading.Event()

    def hold(fd: int, n: int, size: int, offset: int) -> None:
        if size > HEADER_BYTES:
            begun.set()
            go.wait()

    io.write = hold
    return begun, go


async def test_a_block_freed_while_it_is_copied_is_nowhere(tmp_path: Path) -> None:
    io = Faulty()
    of, holder = await scattered(tmp_path, io)
    copying, go = held(io)
    compacting = asyncio.create_task(of.compact(OTHER))
    await asyncio.to_thread(copying.wait)
    of.free([holder.at.pop(n) for n in sorted(holder.at) if n % 4 == 0])
    go.set()
    await compacting
    assert of.numbers()["ssd_extents"] == len(holder.at)
    assert await right(of, SMALL, holder.at) == set(holder.at)
    await of.close()


async def test_an_erased_block_does_not_survive_as_a_copy(tmp_path: Path) -> None:
    io = Faulty()
    of, holder = await scattered(tmp_path, io)
    gone = [n for n in holder.at if n % 4 == 0]
    copying, go = held(io)
    compacting = asyncio.create_task(of.compact(OTHER))
    await asyncio.to_thread(copying.wait)
    erasing = asyncio.create_task(of.erase([holder.at.pop(n) for n in gone]))
    await asyncio.sleep(0.02)
    go.set()
    await erasing
    await compacting
    assert await right(of, SMALL, holder.at) == set(holder.at)
    await of.close()
    again = await tier(tmp_path, SMALL, OTHER)
    assert set(found(again)) == keys(holder.at)
    await again.close()


async def test_the_old_number_of_a_moved_block_means_the_new_one_once_it_is_written_again(tmp_path: Path) -> None:
    of, holder = await scattered(tmp_path)
    old = set(holder.at.values())
    await of.compact(OTHER)
    other = await put(of, OTHER, range(of.room(OTHER)))
    assert old & set(other.values())
    of.free(other.values())
    of.free(other.values())
    assert await right(of, SMALL, holder.at) == set(holder.at)
    await of.close()
