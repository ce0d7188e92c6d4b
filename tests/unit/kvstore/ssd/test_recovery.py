"""What a start makes of the files it finds, whoever left them and in whatever state."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.ssd import (
    LATENTS,
    NODE,
    OTHER,
    SMALL,
    Faulty,
    Short,
    config,
    flip,
    found,
    key,
    keys,
    peek,
    poke,
    put,
    read,
    right,
    stored,
    tier,
    writes,
)

from moonpool.core.config import MIB
from moonpool.core.layout import DIGEST_BYTES
from moonpool.kvstore.ssd.blocks import ReadEnd
from moonpool.kvstore.ssd.copying import LONGEST
from moonpool.kvstore.ssd.format import HEADER_BYTES, extent_bytes
from moonpool.kvstore.ssd.opening import FORGET_S
from moonpool.kvstore.ssd.scan import in_flight
from moonpool.kvstore.ssd.tier import SsdTier

RECENT = in_flight(2)  # blocks that are verified in full at start
HALF = HEADER_BYTES + SMALL.slot_bytes // 2


async def _written(folder: Path, n: int, chain: bool = False) -> dict[int, int]:
    of = await tier(folder)
    placed = await put(of, SMALL, range(n), chain=chain)
    await of.close()
    return placed


async def _with_older(folder: Path) -> dict[int, int]:
    """Blocks 0 to 39, older than those that are verified in full at start, which follow. Blocks of one write are numbered by
    its threads in any order, so the older ones come in a write of their own.
    """
    of = await tier(folder)
    placed = {**await put(of, SMALL, range(40)), **await put(of, SMALL, range(40, 40 + RECENT))}
    await of.close()
    return placed


@pytest.mark.parametrize("at", [3, 40, HEADER_BYTES - 1, HEADER_BYTES, HALF, HEADER_BYTES + SMALL.block_bytes + 9])
async def test_a_block_cut_by_the_crash_is_dropped_at_start(at: int, tmp_path: Path) -> None:
    placed = await _written(tmp_path, 10)
    flip(tmp_path, SMALL, placed[4], at)
    of = await tier(tmp_path)
    assert set(found(of)) == keys(range(10)) - keys([4])
    if at >= HEADER_BYTES:
        assert of.numbers()["ssd_mismatches_start"] == 1
    await of.close()
    again = await tier(tmp_path)
    assert again.numbers()["ssd_mismatches_start"] == 0, "its header was written over"
    assert again.room(SMALL) == 8 * 85 - 9
    await again.close()


async def test_an_older_block_gone_bad_is_found_out_when_it_is_read(tmp_path: Path) -> None:
    placed = await _with_older(tmp_path)
    flip(tmp_path, SMALL, placed[3], HALF)
    of = await tier(tmp_path)
    lost: list[int] = []
    of.on_lost = lost.extend
    assert found(of)[key(3)] == placed[3]
    assert await read(of, SMALL, {3: placed[3]}) == {3: ReadEnd.TORN}
    assert lost == [placed[3]]
    assert of.numbers()["ssd_mismatches_read"] == 1
    assert await right(of, SMALL, {n: placed[n] for n in range(10) if n != 3}) == set(range(10)) - {3}
    assert await read(of, SMALL, {3: placed[3]}) == {3: ReadEnd.GONE}
    await of.close()
    again = await tier(tmp_path)
    assert key(3) not in found(again)
    await again.close()


async def test_a_write_cut_by_the_crash_is_dropped_at_start_though_other_threads_had_theirs_done(tmp_path: Path) -> None:
    disk, inside, overtaken = Faulty(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def cut_late(fd: int, n: int, size: int, offset: int) -> Short | None:
        if size != extent_bytes(SMALL):
            return None
        loop.call_soon_threadsafe(inside.set)
        overtaken.wait()
        return Short(HEADER_BYTES + HEADER_BYTES)

    of = await tier(tmp_path, io=disk)
    disk.write = cut_late
    first = asyncio.create_task(of.write(writes(SMALL, [0])))
    await inside.wait()
    await put(of, SMALL, range(1, 1 + 2 * LONGEST))  # what the other two threads can have numbered meanwhile
    overtaken.set()
    assert await first == [None]
    await of.close()
    again = await tier(tmp_path)
    assert set(found(again)) == keys(range(1, 1 + 2 * LONGEST))
    assert again.numbers()["ssd_mismatches_start"] == 1
    await again.close()


async def test_a_block_in_the_place_of_another_is_torn(tmp_path: Path) -> None:
    placed = await _with_older(tmp_path)
    of = await tier(tmp_path)
    poke(tmp_path, SMALL, placed[1], peek(tmp_path, SMALL, placed[2]))  # header and all
    assert await read(of, SMALL, {1: placed[1]}) == {1: ReadEnd.TORN}
    poke(tmp_path, SMALL, placed[3], peek(tmp_path, SMALL, placed[2])[HEADER_BYTES:], at=HEADER_BYTES)  # bytes alone
    assert await read(of, SMALL, {3: placed[3]}) == {3: ReadEnd.TORN}
    assert await right(of, SMALL, {2: placed[2]}) == {2}
    await of.close()


async def test_a_thousand_flipped_bits_are_all_found_out(tmp_path: Path) -> None:
    rng, padding = random.Random(5), HEADER_BYTES + SMALL.block_bytes + SMALL.layers * DIGEST_BYTES
    of = await tier(tmp_path, ssd_bytes=16 * MIB)
    placed = await put(of, SMALL, range(1_000))
    harmless = set()
    for n, extent in placed.items():
        at = rng.randrange(extent_bytes(SMALL))
        poke(tmp_path, SMALL, extent, bytes((peek(tmp_path, SMALL, extent)[at] ^ 1 << rng.randrange(8),)), at)
        if at >= padding:
            harmless.add(n)
    assert await right(of, SMALL, placed) == harmless
    assert of.numbers()["ssd_mismatches_read"] == 1_000 - len(harmless)
    await of.close()


async def test_a_write_that_the_disk_forgot_is_torn(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    (extent,) = (await put(of, SMALL, [1])).values()
    before = peek(tmp_path, SMALL, extent)
    of.free([extent])
    assert await put(of, SMALL, [2]) == {2: extent}
    poke(tmp_path, SMALL, extent, before)
    assert await read(of, SMALL, {2: extent}) == {2: ReadEnd.TORN}
    await of.close()


async def test_a_header_of_an_earlier_life_of_the_segment_counts_for_nothing(tmp_path: Path) -> None:
    of = await tier(tmp_path, ssd_bytes=8 * 60 * 1024)
    placed = await put(of, SMALL, range(of.room(SMALL)))
    raw = {n: peek(tmp_path, SMALL, extent) for n, extent in placed.items()}
    of.free(placed.values())
    other = await put(of, OTHER, range(of.room(OTHER)))
    of.free(other.values())
    await put(of, SMALL, [1000])
    for n, extent in placed.items():
        poke(tmp_path, SMALL, extent, raw[n])
    await of.close()
    again = await tier(tmp_path)
    assert set(found(again)).isdisjoint(keys(placed))
    await again.close()


async def test_blocks_whose_parent_is_nowhere_are_dropped_and_their_space_is_free(tmp_path: Path) -> None:
    placed = await _written(tmp_path, 10, chain=True)
    poke(tmp_path, SMALL, placed[6], bytes(HEADER_BYTES))
    of = await tier(tmp_path)
    assert [b.key for b in of.recovered] == [key(n) for n in range(6)]
    assert of.numbers()["ssd_orphans_at_start"] == 3
    assert of.room(SMALL) == 8 * 85 - 6
    await of.close()


async def test_of_two_copies_the_newer_one_that_is_whole_wins(tmp_path: Path) -> None:
    of = await tier(tmp_path)
    first = await put(of, SMALL, range(5))
    second = await put(of, SMALL, range(5))
    await of.close()
    flip(tmp_path, SMALL, second[2], HALF)
    again = await tier(tmp_path)
    assert found(again) == {key(n): first[n] if n == 2 else second[n] for n in range(5)}
    await again.quiet()
    assert again.room(SMALL) == 8 * 85 - 5
    await again.close()


async def test_a_layout_registered_later_finds_its_blocks_and_another_block_size_finds_none(tmp_path: Path) -> None:
    placed = await _written(tmp_path, 10)
    of = await tier(tmp_path, OTHER)
    assert of.recovered == []
    assert of.register(replace(SMALL, block_tokens=32)) == []
    assert of.register(replace(SMALL, model="another")) == []
    assert {b.key: b.extent for b in of.register(SMALL)} == {key(n): e for n, e in placed.items()}
    assert of.register(SMALL) == []
    assert await right(of, SMALL, placed) == set(range(10))
    await of.close()


async def test_blocks_of_an_unknown_layout_make_room_when_the_cap_is_reached(tmp_path: Path) -> None:
    await _written(tmp_path, 8 * 85)
    of = await tier(tmp_path, OTHER)
    room = of.room(OTHER)
    assert room == 8 * 31
    await put(of, OTHER, range(room))
    assert of.register(SMALL) == []
    assert of.numbers()["ssd_extents_forgotten"] == 8 * 85
    await of.close()


async def test_blocks_of_a_layout_unknown_for_a_day_are_given_up(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    of = await tier(tmp_path, wall=lambda: now)
    await put(of, SMALL, range(5))
    await of.close()
    for later, left in ((FORGET_S - 60, 5), (FORGET_S + 60, 0)):
        day = await tier(tmp_path, OTHER, wall=lambda later=later: now + later)
        assert day.numbers()["ssd_extents_unknown"] == left
        await day.close()
    of = await tier(tmp_path, wall=lambda: now + 2 * FORGET_S)
    assert of.recovered == []
    await of.close()


@pytest.mark.parametrize("later", [True, False])
async def test_a_layout_in_use_is_not_forgotten(later: bool, tmp_path: Path) -> None:
    now = 1_800_000_000.0
    of = await tier(tmp_path, wall=lambda: now)
    placed = await put(of, SMALL, range(5))
    await of.close()
    for day in range(1, 4):
        of = await tier(tmp_path, OTHER if later else SMALL, wall=lambda day=day: now + day * (FORGET_S - 60))
        of.register(SMALL)
        await of.close()
    of = await tier(tmp_path, OTHER, wall=lambda: now + 4 * FORGET_S - 600)
    of.recovered += of.register(SMALL)
    assert found(of) == {key(n): e for n, e in placed.items()}
    await of.close()


async def test_clearing_for_everybody_includes_layouts_that_nobody_registered(tmp_path: Path) -> None:
    await _written(tmp_path, 5)
    of = await tier(tmp_path, OTHER)
    await of.erase_unknown()
    assert of.register(SMALL) == []
    await of.close()
    again = await tier(tmp_path)
    assert again.recovered == []
    await again.close()


async def test_a_smaller_cap_removes_files_and_a_larger_one_adds_some(tmp_path: Path) -> None:
    await _written(tmp_path, 8 * 85)
    for cap in (4 * MIB, 20 * MIB, 8 * MIB):
        of = await tier(tmp_path, ssd_bytes=cap)
        size = sum(p.stat().st_size for p in (tmp_path / NODE).iterdir())
        assert cap * 3 // 4 < size <= cap
        assert await right(of, SMALL, {}) == set()
        assert len(found(of)) == 4 * 85
        await of.close()


async def test_a_file_cut_while_nobody_looked_loses_only_what_was_cut_off(tmp_path: Path) -> None:
    placed = await _written(tmp_path, 50)
    path, offset, _ = stored(tmp_path, SMALL, placed[20])
    with path.open("r+b") as file:
        file.truncate(offset + 100)
    of = await tier(tmp_path)
    assert set(found(of)) == keys(range(20))
    assert path.stat().st_size == MIB
    await of.close()


async def test_files_and_headers_of_somebody_else_are_neither_read_nor_run(tmp_path: Path) -> None:
    placed = await _written(tmp_path, 10)
    marker = tmp_path / "marker"

    raw = f"cos\nmkdir\n(V{marker}\ntR.".encode()  # a pickle that makes a folder when it is loaded
    folder = tmp_path / NODE
    for name in ("segment-000099", "notes.txt", "segment-1", "index.pkl"):
        (folder / name).write_bytes(raw)
    poke(tmp_path, SMALL, placed[3], raw)
    poke(tmp_path, SMALL, placed[5], raw, at=HEADER_BYTES)
    (folder / "segment-000050").symlink_to("/dev/zero")
    of = await tier(tmp_path)
    assert set(found(of)) == keys(range(10)) - keys([3, 5])
    assert not marker.exists()
    assert (folder / "notes.txt").read_bytes() == raw, "not ours, so not touched"
    assert not (folder / "segment-000099").exists()
    await of.close()


async def test_progress_of_the_start_is_told(tmp_path: Path) -> None:
    await _written(tmp_path, 10)
    told: list[tuple[int, int]] = []
    of = await SsdTier.open(config(tmp_path), NODE, [SMALL], progress=lambda done, total: told.append((done, total)))
    await of.close()
    assert told and told[-1][0] == told[-1][1] >= 10
    assert [done for done, _ in told] == sorted(done for done, _ in told)


async def test_large_extents_are_found_by_their_headers_alone(tmp_path: Path) -> None:
    large = replace(SMALL, layers=16, head_dim=64)
    assert extent_bytes(large) > 64 << 10
    of = await tier(tmp_path, large)
    placed = await put(of, large, range(of.room(large)), chain=True)
    await of.close()
    again = await tier(tmp_path, large)
    assert found(again, large) == {key(n): e for n, e in placed.items()}
    assert await right(again, large, placed) == set(placed)
    await again.close()


async def test_latents_are_found_again_beside_keys_and_values(tmp_path: Path) -> None:
    of = await tier(tmp_path, SMALL, LATENTS)
    plain, latents = await put(of, SMALL, range(10), chain=True), await put(of, LATENTS, range(20), chain=True)
    await of.close()
    again = await tier(tmp_path, SMALL, LATENTS)
    assert found(again, LATENTS) == {key(n): e for n, e in latents.items()}
    assert await right(again, LATENTS, latents) == set(latents)
    assert await right(again, SMALL, plain) == set(plain)
    await again.close()


async def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from support.ssd import tier, put, SMALL\n"
        "async def main():\n"
        "    of = await tier(Path(sys.argv[1]))\n"
        "    await put(of, SMALL, range(5), chain=True)\n"
        "    print('up', flush=True)\n"
        "    sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[3])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        with pytest.raises(Exception, match="in use by another process"):
            await tier(tmp_path)
        child.kill()
    of = await tier(tmp_path)
    assert set(found(of)) == keys(range(5))
    assert await of.write(writes(SMALL, [7])) != [None]
    await of.close()
