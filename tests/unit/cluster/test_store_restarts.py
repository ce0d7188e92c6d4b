"""A memory file system with room for one pool and a fifth: a killed store node's files must make way for its next life's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.store import LAYOUT, block_bytes, block_keys, until
from support.store_process import Processes, store_processes

from moonpool.kvstore import slices

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

MIB = 1 << 20
POOL = 6 * MIB
KILLS = 5
KEYS = block_keys("k", 6)


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[Path]:
    """Room for somebody else's pool and 1.2 times our own."""
    folder = tmp_path / "memory"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() or mount is None:
        pytest.skip("mounting a tmpfs needs root")
    size = POOL + POOL * 12 // 10
    made = subprocess.run((mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder), capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", folder), check=True)


def files(folder: Path, cluster: str) -> dict[str, int]:
    """Region files of a cluster, and which files they really are."""
    return {path.name: path.stat().st_ino for path in folder.glob(f"moonpool+{cluster}+*")}


async def kept(s: Processes, node: str) -> int:
    """Right blocks of KEYS that a worker there reads."""
    async with s.worker(node, "decode-r") as reader:
        ticket = await reader.pin(KEYS)
        into = np.empty(LAYOUT.slice_bytes, np.uint8)
        for slot in ticket.slots:
            reader.read_slice(slot, 0, into, LAYOUT.block_tokens)
            assert (into == slices.slice_of(LAYOUT, block_bytes(slot.key), 0, 0)).all()
        await reader.unpin(ticket)
        return len(ticket.slots)


async def publish(s: Processes, node: str) -> None:
    async with s.worker(node, "decode-w") as author:
        assert await author.publish([(key, block_bytes(key)) for key in KEYS]) == len(KEYS)


async def test_a_node_killed_again_and_again_or_told_to_leave_finds_room_and_leaves_another_runs_memory_alone(
    tight: Path,
) -> None:
    def sections(cluster: str) -> dict[str, dict[str, object]]:
        folder = tight.parent / cluster
        folder.mkdir()
        own = {"name": cluster, "state_dir": str(folder), "key_file": str(folder / "hash.key")}
        return {"cluster": own, "store": {"directory": str(tight), "pool_bytes": POOL}}

    async with (
        store_processes(tight.parent, "a", **sections("other")) as other,
        store_processes(tight.parent, "b", **sections("ours")) as ours,
    ):
        await publish(other, "a")
        theirs = files(tight, "other")
        for number in (*[signal.SIGKILL] * KILLS, signal.SIGTERM):
            await publish(ours, "b")
            former = ours.member("b")
            ours.signal("b", number)
            await until(lambda: not ours.live("b"), "its end is known")
            if number is signal.SIGTERM:
                await until(lambda: not files(tight, "ours"), "it takes its memory along")
            await ours.start("b")
            pid = ours.member("b").pid
            assert pid != former.pid
            assert {name.split("+")[3] for name in files(tight, "ours")} == {str(pid)}
            assert sum(path.stat().st_size for path in tight.glob(f"moonpool+ours+*+{pid}+*")) > POOL * 0.9
            assert await kept(ours, "b") == 0, "a new life begins empty"
        assert files(tight, "other") == theirs
        assert await kept(other, "a") == len(KEYS)
    assert list(tight.glob("moonpool+*")) == []
