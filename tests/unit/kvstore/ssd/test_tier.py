"""Blocks written, read, freed, found again: the tier as the pool sees it."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.ssd import NODE, OTHER, SMALL, Faulty, config, found, key, keys, put, read, right, slots, tier, writes

from moonpool.core.config import MIB
from moonpool.core.errors import Bug, ConfigError
from moonpool.core.ids import NodeId
from moonpool.core.layout import DIGEST_BYTES
from moonpool.core.use import Use
from moonpool.kvstore.ssd.blocks import Read, ReadEnd
from moonpool.kvstore.ssd.tier import SsdTier


async def test_what_was_written_is_read_and_found_after_a_restart(tmp_path: Path) -> None:
    first = await tier(tmp_path, SMALL, OTHER)
    assert first.recovered == []
    room = first.room(SMALL)
    small, other = await put(first, SMALL, range(20), chain=True), await put(first, OTHER, range(5), chain=True)
    assert await right(first, SMALL, small) == set(range(20))
    assert await right(first, OTHER, other) == set(range(5))
    assert first.room(SMALL) < room - 20
    await first.close()
    second = await tier(tmp_path, SMALL, OTHER)
    assert found(second) == {key(n): extent for n, extent in small.items()}
    assert found(second, OTHER) == {key(n): extent for n, extent in other.items()}
    assert await right(second, SMALL, small) == set(range(20))
    await second.close()


async def test_a_found_block_knows_its_parent_and_whose_it_is_and_comes_after_its_parent(tmp_path: Path) -> None:
    use = Use("tenant é", "agent", 3, 4_000)
    first = await tier(tmp_path)
    await first.write(list(reversed(writes(SMALL, range(8), use, chain=True))))
    await first.close()
    second = await tier(tmp_path)
    assert [(b.key, b.parent) for b in second.recovered] == [(key(n), key(n - 1) if n else None) for n in range(8)]
    assert {b.use for b in second.recovered} == {use}
    await second.close()


async def test_only_slots_in_pages_are_taken(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    shifted = np.zeros(SMALL.slot_bytes + 4096, np.uint8)
    start = -shifted.__array_interface__["data"][0] % 4096 + 8
    with pytest.raises(Bug):
        await of.write([replace(writes(SMALL, [1])[0], data=shifted[start : start + SMALL.slot_bytes])])
    with pytest.raises(Bug):
        await of.read([Read(0, key(1), SMALL, slots(OTHER, 1)[0])], 1.0)
    await of.close()


async def test_extents_that_do_not_exist_are_gone(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    placed = await put(of, SMALL, [1])
    (extent,) = placed.values()
    got = await read(of, SMALL, {1: extent + 1, 2: extent + (1 << 30), 3: (1 << 50)})
    assert set(got.values()) == {ReadEnd.GONE}
    assert await read(of, OTHER, {1: extent}) == {1: ReadEnd.GONE}
    of.free([extent, extent, 1 << 50])
    assert await read(of, SMALL, placed) == {1: ReadEnd.GONE}
    await of.close()


async def test_one_extent_may_be_read_twice_at_once(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    (extent,) = (await put(of, SMALL, [1])).values()
    memory = slots(SMALL, 2)
    assert await of.read([Read(extent, key(1), SMALL, into) for into in memory], 60.0) == [ReadEnd.OK] * 2
    assert (memory[0] == memory[1]).all()
    await of.close()


async def test_the_cap_is_never_passed_and_a_full_tier_says_no(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    room = of.room(SMALL)
    extents = await of.write(writes(SMALL, range(room + 10)))
    assert sum(e is None for e in extents) == 10
    assert of.room(SMALL) == 0
    assert sum(p.stat().st_size for p in (tmp_path / NODE).iterdir()) <= 8 * MIB
    of.free([e for e in extents[:7] if e is not None])
    assert of.room(SMALL) == 7
    assert sum(e is not None for e in await of.write(writes(SMALL, range(room, room + 10)))) == 7
    assert of.numbers()["ssd_writes_without_room"] == 13
    await of.close()


async def test_files_are_few_large_private_and_allocated(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    await put(of, SMALL, range(100))
    files = [p for p in (tmp_path / NODE).iterdir() if p.name != "lock"]
    assert len(files) == 8
    assert {stat.S_IMODE(p.stat().st_mode) for p in [*files, tmp_path / NODE / "lock"]} == {0o600}
    assert stat.S_IMODE((tmp_path / NODE).stat().st_mode) == 0o700
    assert all(p.stat().st_size == MIB and p.stat().st_blocks * 512 >= MIB for p in files)
    await of.close()


async def test_a_freed_block_may_come_back_after_a_restart_but_an_erased_one_never(tmp_path: Path) -> None:
    first = await tier(tmp_path)
    placed = await put(first, SMALL, range(10))
    twice = await put(first, SMALL, [3])  # a second copy of a block
    first.free([placed[1], placed[2]])
    await first.close()
    second = await tier(tmp_path)
    assert keys(range(3, 10)) <= set(found(second)) <= keys(range(10))
    second.free([found(second)[key(4)]])
    await second.erase([found(second)[key(5)], twice[3]])
    room = second.room(SMALL)
    await second.close()
    third = await tier(tmp_path)
    assert set(found(third)).isdisjoint(keys([3, 4, 5])), "erasing takes older copies and freed blocks along"
    assert set(found(third)) >= keys(range(6, 10))
    assert third.room(SMALL) >= room
    assert await right(third, SMALL, {n: placed[n] for n in range(6, 10)}) == set(range(6, 10))
    await third.close()


async def test_a_freed_extent_stays_untouched_while_it_is_read(tmp_path: Path) -> None:
    import asyncio

    io = Faulty()
    of = await tier(tmp_path, io=io, ssd_bytes=8 * 24 * 1024, ssd_threads=2)
    assert of.room(SMALL) == 8
    placed = await put(of, SMALL, range(8))
    io.gate.clear()
    reading = asyncio.create_task(right(of, SMALL, {0: placed[0]}))
    await asyncio.to_thread(io.inside.acquire)
    of.free([placed[0]])
    assert of.room(SMALL) == 0
    assert await of.write(writes(SMALL, [9])) == [None]
    io.gate.set()
    assert await reading == {0}
    assert of.room(SMALL) == 1
    await of.close()


async def test_bytes_that_no_digest_covers_never_leave_the_tier(tmp_path: Path) -> None:
    """The rest of a slot after its trailer may hold anything in DRAM: poison, or a block of somebody else."""
    of = await tier(tmp_path)
    block = writes(SMALL, [1])[0]
    end = SMALL.block_bytes + SMALL.layers * DIGEST_BYTES
    assert (block.data[end:] == 0xFF).all()
    (extent,) = await of.write([block])
    assert extent is not None
    (into,) = slots(SMALL, 1)
    assert await of.read([Read(extent, key(1), SMALL, into)], 60.0) == [ReadEnd.OK]
    assert (into[:end] == block.data[:end]).all()
    assert not into[end:].any()
    await of.close()


async def test_a_slot_that_differs_from_its_own_digests_is_not_written(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    blocks = writes(SMALL, range(5))
    blocks[2].data[100] ^= 1
    extents = await of.write(blocks)
    assert [e is None for e in extents] == [False, False, True, False, False]
    assert of.numbers()["ssd_mismatches_write"] == 1
    assert await right(of, SMALL, {n: e for n, e in enumerate(extents) if e is not None}) == {0, 1, 3, 4}
    await of.close()
    again = await tier(tmp_path)
    assert set(found(again)) == keys([0, 1, 3, 4])
    await again.close()


async def test_a_tier_too_small_for_one_block_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssd_bytes.*use 294912 or more"):
        await tier(tmp_path, OTHER, ssd_bytes=64 * 1024)
    of = await tier(tmp_path, OTHER, ssd_bytes=294_912)
    assert of.room(OTHER) == 8
    await put(of, OTHER, range(8))
    large = replace(OTHER, layers=40)
    assert of.register(large) == []
    assert of.room(large) == 0
    assert await of.write(writes(large, [1])) == [None]
    await of.close()


async def test_two_processes_never_share_a_folder_but_nodes_share_a_path(tmp_path: Path) -> None:
    one = await tier(tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path / NODE)):
        await tier(tmp_path)
    two = await SsdTier.open(config(tmp_path), NodeId("m"), [SMALL])
    placed = await put(two, SMALL, range(3))
    assert await right(one, SMALL, placed) == set()
    await two.close()
    await one.close()
    again = await tier(tmp_path)
    assert again.recovered == []
    await again.close()


@pytest.mark.parametrize("path", ["file/below", "/proc/nowhere"])
async def test_a_folder_that_cannot_be_made_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"store\.ssd_path: .*name a folder"):
        await tier(tmp_path / path)


async def test_where_direct_io_is_refused_the_page_cache_serves_and_says_so(tmp_path: Path) -> None:
    io = Faulty()
    io.direct = False
    of = await tier(tmp_path, io=io)
    placed = await put(of, SMALL, range(4))
    assert await right(of, SMALL, placed) == set(range(4))
    assert of.words()["ssd_io"] == "through the page cache"
    assert of.numbers()["ssd_bytes_read_direct"] == 0
    assert of.numbers()["ssd_bytes_read"] > 0
    await of.close()


async def test_writes_and_reads_keep_to_their_bandwidth(tmp_path: Path) -> None:
    now = 0.0
    of = await SsdTier.open(config(tmp_path, ssd_read_bytes_per_s=1.0), NODE, [SMALL], clock=lambda: now)
    placed = await put(of, SMALL, range(40))
    one = {0: placed[0]}
    assert await right(of, SMALL, one) == {0}  # the first goes; the next one waits until a second per byte is over
    assert await read(of, SMALL, {1: placed[1]}, deadline_s=0.05) == {1: ReadEnd.LATE}
    now = 1e6
    assert await right(of, SMALL, one) == {0}
    await of.close()
