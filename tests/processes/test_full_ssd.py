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
from support.ssd import NODE, OTHER, found, keys, put, right, tier

from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError

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
    assert "3.2 MiB of the file system stay free for others" in of.words()["ssd_notes"]
    assert "(1.0 GiB asked for; no more was taken: " in of.line
    assert shutil.disk_usage(device).free >= DEVICE // 20
    placed = await put(of, OTHER, range(of.room(OTHER)))
    assert await of.write([]) == []
    assert await right(of, OTHER, placed) == set(placed)
    await of.close()
    again = await tier(device, OTHER, ssd_bytes=16 * DEVICE)
    assert len(found(again, OTHER)) == len(placed)
    await again.close()


async def test_files_removed_from_a_full_device_are_made_again_of_the_space_they_leave(device: Path) -> None:
    (device / "theirs").write_bytes(bytes(DEVICE - 10 * MIB))
    of = await tier(device, OTHER, ssd_bytes=16 * DEVICE)
    assert of.numbers()["ssd_bytes"] == 6 * MIB
    placed = await put(of, OTHER, range(of.room(OTHER)))
    for path in (device / NODE).glob("segment-*"):
        path.unlink()
    assert await right(of, OTHER, placed) == set()
    await of.quiet()
    assert of.room(OTHER) == len(placed)
    assert await right(of, OTHER, again := await put(of, OTHER, range(of.room(OTHER)))) == set(again)
    await of.close()


async def test_a_cap_that_the_device_could_hold_if_others_did_not_is_refused_unless_it_is_held_already(device: Path) -> None:
    theirs = device / "theirs"
    theirs.write_bytes(bytes(DEVICE // 2))
    with pytest.raises(ConfigError, match=r"store\.ssd_bytes: 50331648 bytes .* 32\.0 MiB of 64\.0 MiB are free.* or less"):
        await tier(device, OTHER, ssd_bytes=48 * MIB)
    theirs.unlink()
    of = await tier(device, OTHER, ssd_bytes=48 * MIB)
    placed = await put(of, OTHER, range(5))
    await of.close()
    theirs.write_bytes(bytes(DEVICE - 49 * MIB))
    again = await tier(device, OTHER, ssd_bytes=48 * MIB)
    assert again.numbers()["ssd_bytes"] == 48 * MIB
    assert set(found(again, OTHER)) == keys(placed)
    await again.close()
    larger = await tier(device, OTHER, ssd_bytes=60 * MIB)
    assert larger.numbers()["ssd_bytes"] == 48 * MIB
    assert "stay free for others" in larger.line
    await larger.close()


async def test_a_file_system_that_refuses_before_its_space_is_used_gives_a_smaller_tier(device: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=8", str(device)], check=True)
    of = await tier(device, OTHER, ssd_bytes=48 * MIB)
    assert 0 < of.numbers()["ssd_bytes"] < 48 * MIB
    assert "No space left on device" in of.words()["ssd_notes"]
    assert await right(of, OTHER, placed := await put(of, OTHER, range(of.room(OTHER)))) == set(placed)
    await of.close()


async def test_no_size_given_takes_a_quarter_of_what_is_free_and_keeps_it_when_others_fill_the_rest(device: Path) -> None:
    of = await tier(device, OTHER, ssd_bytes=0)
    size = of.numbers()["ssd_bytes"]
    assert DEVICE // 5 < size <= DEVICE // 4
    await of.close()
    (device / "theirs").write_bytes(bytes(DEVICE // 2))
    again = await tier(device, OTHER, ssd_bytes=0)
    assert again.numbers()["ssd_bytes"] == size
    await again.close()


def test_files_that_may_not_grow_give_a_smaller_tier(tmp_path: Path) -> None:
    got = _child(tmp_path, size=64 * MIB, limit=3 * MIB)
    assert "File too large" in got["words"]["ssd_notes"]
    assert got["placed"] == got["read"]
    assert 0 < got["bytes"] <= 64 * MIB


def test_no_file_at_all_leaves_a_tier_without_room(tmp_path: Path) -> None:
    got = _child(tmp_path, size=64 * MIB, limit=1)
    assert (got["placed"], got["bytes"]) == (0, 0)
