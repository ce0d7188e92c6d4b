from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shared import SOON_S, USE, is_right, reads, shared_tier, untouched, writes
from support.store import LAYOUT, block_keys, until

from moonpool.core.config import StoreConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.kvstore.shared_tier.crew import WAITING_PER_THREAD
from moonpool.kvstore.shared_tier.form import LONGEST_PAUSE_S, Outage, copy_of, object_bytes, object_name, seal, slot_in
from moonpool.kvstore.shared_tier.places import UNFINISHED, Folder
from moonpool.kvstore.shared_tier.tier import SharedTier
from moonpool.kvstore.ssd.blocks import ReadEnd


def path_of(folder: Path, key: bytes) -> Path:
    return folder / object_name(LAYOUT.fingerprint, key)


async def test_blocks_that_one_node_wrote_are_found_and_read_by_another(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as one, shared_tier(tmp_path, "b") as other:
        assert await one.write(writes("p", 20)) == [True] * 20
        assert await other.exists(LAYOUT, block_keys("p", 25), SOON_S) == 20
        wanted = reads("p", 21)
        assert await other.read(wanted, SOON_S) == [ReadEnd.OK] * 20 + [ReadEnd.GONE]
        assert all(is_right(read) for read in wanted[:20]) and untouched(wanted[20])
        assert other.numbers()["shared_bytes_read"] == 20 * object_bytes(LAYOUT)


async def test_only_leading_blocks_count_and_layouts_are_apart(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as tier:
        blocks = writes("p", 12)
        await tier.write([*blocks[:5], *blocks[6:]])
        assert await tier.exists(LAYOUT, block_keys("p", 12), SOON_S) == 5
        assert await tier.exists(replace(LAYOUT, model="cd" * 16), block_keys("p", 12), SOON_S) == 0
        assert await tier.exists(LAYOUT, [], SOON_S) == 0


async def test_a_block_is_written_once(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as one, shared_tier(tmp_path, "b") as other:
        done = await asyncio.gather(one.write(writes("p", 4)), other.write(writes("p", 4)))
        assert done == [[True] * 4] * 2
        assert await one.write(writes("p", 4)) == [True] * 4
        assert one.counted["blocks_there_already"] >= 4
        assert sum(path.is_file() for path in tmp_path.rglob("*")) == 4


async def test_a_block_that_differs_from_its_digests_is_not_written(tmp_path: Path) -> None:
    bad, good = writes("p", 2)
    bad.data[5] ^= 1
    async with shared_tier(tmp_path) as tier:
        assert await tier.write([bad, good]) == [False, True]
        assert tier.counted["mismatches_write"] == 1
        assert await tier.exists(LAYOUT, block_keys("p", 2), SOON_S) == 0


async def test_a_name_too_long_for_the_header_is_not_written(tmp_path: Path) -> None:
    (block,) = writes("p", 1)
    async with shared_tier(tmp_path) as tier:
        assert await tier.write([replace(block, use=replace(USE, kind="k" * 600))]) == [False]
        assert tier.counted["writes_unfit"] == 1


def sealed() -> tuple[bytes, np.ndarray]:
    (block,) = writes("p", 1)
    raw = seal(copy_of(block), block)
    assert raw is not None
    return block.key, raw


@given(st.integers(0, object_bytes(LAYOUT) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_that_anybody_would_read_is_noticed(at: int, by: int) -> None:
    key, raw = sealed()
    raw[at] ^= by
    padding = at >= object_bytes(LAYOUT) - LAYOUT.slot_bytes + LAYOUT.block_bytes + 8 * LAYOUT.layers
    assert (slot_in(raw, LAYOUT, key) is not None) == padding


@given(st.binary(max_size=200), st.integers(0, object_bytes(LAYOUT)))
@settings(max_examples=100, deadline=None)
def test_foreign_and_cut_objects_are_not_blocks(junk: bytes, cut: int) -> None:
    key, raw = sealed()
    foreign = np.frombuffer(junk.ljust(raw.size, b"\0"), np.uint8)
    assert slot_in(foreign, LAYOUT, key) is None
    assert slot_in(raw[:cut], LAYOUT, key) is None or cut == raw.size
    assert slot_in(raw, LAYOUT, b"k" * 16) is None
    assert slot_in(raw, replace(LAYOUT, model="cd" * 16), key) is None


async def test_torn_foreign_and_misplaced_objects_are_misses_and_are_written_anew(tmp_path: Path) -> None:
    keys = block_keys("p", 6)
    async with shared_tier(tmp_path) as tier:
        await tier.write(writes("p", 6))
        paths = [path_of(tmp_path, key) for key in keys]
        os.truncate(paths[0], 100)
        os.truncate(paths[1], 1 << 40)  # whoever reads all of it runs out of memory
        changed = bytearray(paths[2].read_bytes())
        changed[5_000] ^= 1
        paths[2].write_bytes(changed)
        paths[3].write_bytes(paths[5].read_bytes())
        paths[4].unlink()
        paths[4].symlink_to(paths[5])
        wanted = reads("p", 6)
        assert await tier.read(wanted, SOON_S) == [ReadEnd.TORN] * 5 + [ReadEnd.OK]
        assert all(untouched(read) for read in wanted[:5])
        assert tier.counted["reads_torn"] == 5 and tier.numbers()["shared_readable"]
        assert await tier.exists(LAYOUT, keys, SOON_S) == 0
        assert await tier.write(writes("p", 6)) == [True] * 6
        assert await tier.read(reads("p", 6), SOON_S) == [ReadEnd.OK] * 6


async def test_a_pipe_under_a_block_s_name_stops_nobody(tmp_path: Path) -> None:
    (key,) = block_keys("p", 1)
    path_of(tmp_path, key).parent.mkdir(parents=True)
    os.mkfifo(path_of(tmp_path, key))
    async with shared_tier(tmp_path) as tier:
        assert await tier.read(reads("p", 1), SOON_S) == [ReadEnd.TORN]


async def test_erased_blocks_are_gone_for_everybody(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as one, shared_tier(tmp_path, "b") as other:
        await one.write(writes("p", 3))
        assert await other.exists(LAYOUT, block_keys("p", 3), SOON_S) == 3
        assert await one.erase(LAYOUT, block_keys("p", 5)) == 3
        assert await other.read(reads("p", 3), SOON_S) == [ReadEnd.GONE] * 3
        assert await other.exists(LAYOUT, block_keys("p", 3), SOON_S) == 0


async def test_what_this_node_left_unfinished_is_removed_at_start_and_others_files_are_not(tmp_path: Path) -> None:
    unfinished = tmp_path / UNFINISHED
    unfinished.mkdir()
    (unfinished / "a+17+0").touch()
    (unfinished / "ab+17+0").touch()
    async with shared_tier(tmp_path, "a"):
        assert [path.name for path in unfinished.iterdir()] == ["ab+17+0"]


async def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"store\.shared_path: .*/file: Not a directory; name a folder"):
        await SharedTier.open(StoreConfig(shared_path=str(tmp_path / "file")), NodeId("a"))


@pytest.mark.parametrize("path", ["ftp://host/kv", "S3://bucket/kv", "file:///mnt/kv", "nfs:/kv"])
async def test_a_kind_of_storage_that_does_not_exist_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"store\.shared_path: {path}: \w+: is nothing .* or s3://bucket/prefix"):
        await SharedTier.open(StoreConfig(shared_path=path), NodeId("a"))


async def test_a_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"store\.shared_path: kv: is relative.* by its absolute path"):
        await SharedTier.open(StoreConfig(shared_path="kv"), NodeId("a"))
    assert list((tmp_path / "kv").iterdir()) == []


async def test_a_folder_that_is_not_there_is_not_made_for_it_may_be_a_missing_mount(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.shared_path: .*/kv: there is no such folder; mount it, or create it"):
        await SharedTier.open(StoreConfig(shared_path=str(tmp_path / "kv")), NodeId("a"))
    assert not (tmp_path / "kv").exists()


CHILD = """
import itertools, sys
import numpy as np
from pathlib import Path
from moonpool.core.ids import NodeId
from moonpool.kvstore.shared_tier.places import Folder
folder, data = Folder.open(sys.argv[1], NodeId("a")), np.full(4 << 20, 5, np.uint8)
for i in itertools.count():
    folder.put(f"aa/bb/{i}", data)
"""


async def test_a_writer_killed_in_the_middle_leaves_whole_objects_only(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)])
    try:
        await until(lambda: (tmp_path / "aa/bb/2").exists() and any((tmp_path / UNFINISHED).iterdir()), "a write goes on", 60.0)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert {path.stat().st_size for path in (tmp_path / "aa/bb").iterdir()} == {4 << 20}
    Folder.open(str(tmp_path), NodeId("a"))
    assert list((tmp_path / UNFINISHED).iterdir()) == []


class Stuck(Folder):
    """A mount that hangs until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, NodeId("a"))
        self.let_go, self.inside = threading.Event(), threading.Semaphore(0)

    def get(self, name: str, size: int) -> np.ndarray | None:
        self.inside.release()
        self.let_go.wait()
        return super().get(name, size)

    def size(self, name: str) -> int | None:
        self.inside.release()
        self.let_go.wait()
        return super().size(name)


async def test_a_store_that_hangs_delays_nobody_and_touches_no_buffer_later(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as tier:
        await tier.write(writes("p", 6))
    mount = Stuck(tmp_path)
    async with shared_tier(tmp_path, objects=mount, threads=2) as tier:
        wanted, blocks = reads("p", 6), writes("q", 2)
        assert await tier.read(wanted, 0.05) == [ReadEnd.LATE] * 6
        assert await tier.exists(LAYOUT, block_keys("p", 6), 0.05) == 0
        assert await tier.write(blocks, 0.05) == [False, False]
        assert tier.counted["writes_late"] == 2
        for block in blocks:
            block.data[:] = 0
        mount.let_go.set()
        await until(lambda: tier.numbers()["shared_outstanding"] == 0, "the threads return")
        assert all(untouched(read) for read in wanted)
        assert await tier.read(reads("p", 6), SOON_S) == [ReadEnd.OK] * 6
        assert await tier.exists(LAYOUT, block_keys("q", 2), SOON_S) == 0


async def test_what_piles_up_behind_a_store_that_hangs_is_bounded(tmp_path: Path) -> None:
    mount = Stuck(tmp_path)
    async with shared_tier(tmp_path, objects=mount, threads=1) as tier:
        room = 1 + WAITING_PER_THREAD
        assert await tier.read(reads("p", room + 3), 0.01) == [ReadEnd.LATE] * (room + 3)
        assert tier.counted["refused_full"] == 3
        assert tier.numbers()["shared_outstanding"] == room
        mount.let_go.set()


async def test_a_cancelled_read_gives_its_buffers_back_at_once(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as tier:
        await tier.write(writes("p", 1))
    mount = Stuck(tmp_path)
    async with shared_tier(tmp_path, objects=mount, threads=1) as tier:
        wanted = reads("p", 1)
        reading = asyncio.ensure_future(tier.read(wanted, SOON_S))
        await asyncio.to_thread(mount.inside.acquire)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        mount.let_go.set()
        await until(lambda: tier.numbers()["shared_outstanding"] == 0, "the thread returns")
        assert untouched(wanted[0])


class Down(Folder):
    """A mount that answers with errors while it is down."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, NodeId("a"))
        self.down, self.asked = False, 0

    def size(self, name: str) -> int | None:
        self.asked += 1
        if self.down:
            raise OSError("stale file handle")
        return super().size(name)


async def test_an_unreachable_store_is_a_miss_and_is_asked_again_after_growing_pauses(tmp_path: Path) -> None:
    now = 100.0
    mount = Down(tmp_path)
    async with shared_tier(tmp_path) as tier:
        await tier.write(writes("p", 2))
    async with shared_tier(tmp_path, objects=mount, clock=lambda: now, threads=1) as tier:
        mount.down = True
        assert await tier.exists(LAYOUT, block_keys("p", 2), SOON_S) == 0
        asked = mount.asked
        assert await tier.exists(LAYOUT, block_keys("p", 2), SOON_S) == 0
        assert await tier.read(reads("p", 1), SOON_S) == [ReadEnd.LATE]
        assert mount.asked == asked
        assert tier.words()["shared_reads"] == "unreachable, asked again in 0.5 s: stale file handle"
        now += 0.6
        assert await tier.exists(LAYOUT, block_keys("p", 2), SOON_S) == 0
        assert tier.words()["shared_reads"].startswith("unreachable, asked again in 1.0 s")
        mount.down, now = False, now + 1.1
        assert await tier.exists(LAYOUT, block_keys("p", 2), SOON_S) == 2
        assert tier.words()["shared_reads"] == "reachable"
        assert await tier.read(reads("p", 2), SOON_S) == [ReadEnd.OK] * 2


class Full(Folder):
    def put(self, name: str, data: np.ndarray) -> None:
        raise OSError("no space left on device")


async def test_a_store_that_is_full_can_still_be_read(tmp_path: Path) -> None:
    async with shared_tier(tmp_path) as tier:
        await tier.write(writes("p", 2))
    async with shared_tier(tmp_path, objects=Full(tmp_path, NodeId("a"))) as tier:
        assert await tier.write(writes("q", 3)) == [False] * 3
        assert await tier.read(reads("p", 2), SOON_S) == [ReadEnd.OK] * 2
        assert "no space" in tier.words()["shared_writes"]


def test_pauses_double_up_to_a_limit_and_end_with_a_success() -> None:
    outage, now, seen = Outage(), 0.0, []
    for _ in range(12):
        outage.failed("gone", now)
        assert not outage.failed("gone", now)  # an operation of the same outage
        seen.append(outage.left(now))
        now += seen[-1]
    assert seen[:4] == [0.5, 1.0, 2.0, 4.0] and seen[-1] == LONGEST_PAUSE_S
    assert outage.worked() and not outage.worked()
    assert outage.failed("gone", now) and outage.left(now) == 0.5


class Broken(Folder):
    def get(self, name: str, size: int) -> np.ndarray | None:
        raise ZeroDivisionError


async def test_a_bug_in_a_thread_is_raised_where_it_is_awaited(tmp_path: Path) -> None:
    async with shared_tier(tmp_path, objects=Broken(tmp_path, NodeId("a"))) as tier:
        with pytest.raises(ZeroDivisionError):
            await tier.read(reads("p", 1), SOON_S)
