"""File systems that are really full and files that really may not grow: the tier is smaller, and says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ssd import NODE, OTHER, found, put, right, tier

from moonpool.core.config import MIB

pytestmark = pytest.mark.processes

DEVICE = 64 * MIB


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "device"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DEVICE}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _child(folder: Path, size: int, limit: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "support.ssd_child", str(folder), str(size), str(limit)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_a_cap_larger_than_the_device_gives_a_smaller_tier(device: Path) -> None:
    of = await tier(device, OTHER, ssd_bytes=16 * DEVICE)
    assert DEVICE // 2 < of.numbers()["ssd_bytes"] <= DEVICE
    assert "No space left on device" in of.words()["ssd_notes"]
    placed = await put(of, OTHER, range(of.room(OTHER)))
    assert await of.write([]) == []
    assert await right(of, OTHER, placed) == set(placed)
    await of.close()
    again = await tier(device, OTHER, ssd_bytes=16 * DEVICE)
    assert len(found(again, OTHER)) == len(placed)
    await again.close()


async def test_files_removed_from_a_full_device_are_made_again_of_the_space_they_leave(device: Path) -> None:
    (device / "theirs").write_bytes(bytes(DEVICE - 5 * MIB))
    of = await tier(device, OTHER, ssd_bytes=16 * MIB)
    assert of.numbers()["ssd_bytes"] <= 5 * MIB
    placed = await put(of, OTHER, range(of.room(OTHER)))
    for path in (device / NODE).glob("segment-*"):
        path.unlink()
    assert await right(of, OTHER, placed) == set()
    await of.quiet()
    assert of.room(OTHER) == len(placed)
    assert await right(of, OTHER, again := await put(of, OTHER, range(of.room(OTHER)))) == set(again)
    await of.close()


def test_files_that_may_not_grow_give_a_smaller_tier(tmp_path: Path) -> None:
    got = _child(tmp_path, size=64 * MIB, limit=3 * MIB)
    assert "File too large" in got["words"]["ssd_notes"]
    assert got["placed"] == got["read"]
    assert 0 < got["bytes"] <= 64 * MIB


def test_no_file_at_all_leaves_a_tier_without_room(tmp_path: Path) -> None:
    got = _child(tmp_path, size=64 * MIB, limit=1)
    assert (got["placed"], got["bytes"]) == (0, 0)
