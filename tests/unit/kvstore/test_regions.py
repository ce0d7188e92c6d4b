"""Region files on a real file system: sizes, ownership, reclaiming, and a memory file system that is full."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.store import LAYOUT

from moonpool.core.config import MIB, StoreConfig
from moonpool.core.errors import ConfigError, TransferFailed
from moonpool.core.ids import NodeId
from moonpool.core.landing import Region
from moonpool.kvstore.regions import OwnRegions, map_region, plan, reclaim

SLOT = LAYOUT.slot_bytes
NODE = NodeId("a")


def settings(folder: Path, slots: int, region_bytes: int = MIB) -> StoreConfig:
    return StoreConfig(pool_bytes=slots * SLOT, region_bytes=region_bytes, directory=str(folder))


def own(folder: Path, slots: int = 300) -> OwnRegions:
    return OwnRegions.create(settings(folder, slots), "c", NODE, LAYOUT)


def test_the_pool_is_split_into_regions_of_whole_slots() -> None:
    assert plan(StoreConfig(pool_bytes=300 * SLOT, region_bytes=MIB), SLOT, 1 << 40, 1 << 40) == [256, 44]
    assert sum(plan(StoreConfig(), SLOT, 100 * MIB, 1 << 40)) == 50 * MIB // SLOT, "half of free memory by default"
    assert sum(plan(StoreConfig(), SLOT, 1 << 40, 100 * MIB)) == int(98 * MIB) // SLOT, "capped by the file system"


@pytest.mark.parametrize(
    ("config", "free", "space", "field", "numbers"),
    [
        (
            StoreConfig(pool_bytes=3_000_000_000),
            2_000_000_000,
            9_000_000_000,
            "store.pool_bytes",
            "3.00 GB wanted, but 2.00 GB .* use at most 1907 MiB",
        ),
        (StoreConfig(pool_bytes=3_000_000_000), 9_000_000_000, 2_500_000_000, "store.pool_bytes", "2.50 GB of the memory file"),
        (StoreConfig(pool_bytes=SLOT - 1), 1 << 40, 1 << 40, "store.pool_bytes", f"use {SLOT} or more"),
        (StoreConfig(region_bytes=MIB), 1 << 40, 1 << 40, "store.region_bytes", f"use {3 * MIB} or more"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_numbers(
    config: StoreConfig, free: int, space: int, field: str, numbers: str
) -> None:
    with pytest.raises(ConfigError, match=numbers) as e:
        plan(config, 3 * MIB if field == "store.region_bytes" else SLOT, free, space)
    assert e.value.param == field


def test_files_are_private_touched_and_gone_after_close(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    regions = OwnRegions.create(settings(tmp_path, 300), "c", NODE, LAYOUT, lambda done, total: seen.append((done, total)))
    assert [r.size for r in regions.files] == [256 * SLOT, 44 * SLOT]
    assert seen[-1] == (300 * SLOT, 300 * SLOT)
    for region in regions.files:
        found = os.stat(region.path)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_blocks * 512 >= region.size, "allocated, not sparse"
        assert f"+a+{os.getpid()}+" in region.path
    view = map_region(regions.files[1])
    regions.views[1][5] = 77
    assert view[5] == 77
    regions.close()
    assert list(tmp_path.iterdir()) == []
    assert view[5] == 77, "a reader's mapping outlives the file"


def test_files_of_dead_owners_are_reclaimed_and_others_are_not(tmp_path: Path) -> None:
    child = (
        "import sys; from pathlib import Path; from moonpool.kvstore.regions import OwnRegions; "
        f"regions = OwnRegions(Path({str(tmp_path)!r}), 'moonpool+c+a+%d' % __import__('os').getpid(), {SLOT}, [2]); "
        "regions._fill(lambda *_: None); print('made', flush=True); sys.stdin.read()"
    )
    dead = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    with dead:
        assert dead.stdout is not None and dead.stdout.readline() == b"made\n"
        live = own(tmp_path, 2)
        foreign = tmp_path / "moonpool+not-one-of-ours"
        foreign.write_text("x")
        assert reclaim(tmp_path) == 0
        assert len(list(tmp_path.iterdir())) == 3
        dead.send_signal(signal.SIGKILL)
    assert reclaim(tmp_path) == 2 * SLOT
    assert {str(p) for p in tmp_path.iterdir()} == {str(foreign), live.files[0].path}
    live.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs privileges")
def test_files_of_another_user_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "moonpool+c+a+999999999+0"
    theirs.write_bytes(b"theirs")
    os.chown(theirs, 12345, 12345)
    assert reclaim(tmp_path, zeroise=True) == 0
    assert theirs.read_bytes() == b"theirs"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # a failed test may still map it


def test_a_memory_file_system_that_is_too_small_is_refused_before_anything_is_written(small_tmpfs: Path) -> None:
    with pytest.raises(ConfigError, match=r"of the memory file system\s+are free"):
        own(small_tmpfs, 300)
    assert list(small_tmpfs.iterdir()) == []


def test_a_memory_file_system_that_fills_up_meanwhile_is_an_error_and_no_bus_error(small_tmpfs: Path) -> None:
    regions = OwnRegions(small_tmpfs, f"moonpool+c+a+{os.getpid()}", SLOT, [200, 200])
    with pytest.raises(OSError) as e:
        regions._fill(lambda done, total: None)
    assert e.value.errno == errno.ENOSPC
    regions.close()
    assert list(small_tmpfs.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.directory: .*nowhere"):
        own(tmp_path / "nowhere")


def test_only_a_plain_file_of_the_right_size_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "moonpool+c+a+1+0"
    file.write_bytes(bytes(SLOT))
    link = tmp_path / "moonpool+c+a+1+1"
    link.symlink_to(file)
    gone = tmp_path / "moonpool+c+a+1+2"
    folder = tmp_path / "moonpool+c+a+1+3"
    folder.mkdir()
    other = tmp_path / "authorized_keys"
    other.write_bytes(bytes(SLOT))
    assert map_region(Region(0, str(file), SLOT, SLOT)).size == SLOT
    for path, size in ((file, 2 * SLOT), (link, SLOT), (folder, SLOT), (gone, SLOT), (other, SLOT), (file, 0)):
        with pytest.raises(TransferFailed, match="region 0"):
            map_region(Region(0, str(path), size, SLOT))


def test_what_a_pool_held_is_overwritten_at_its_end_and_after_its_owners_death_where_asked_for(tmp_path: Path) -> None:
    regions = OwnRegions.create(settings(tmp_path, 20), "c", NODE, LAYOUT, zeroise=True)
    mapped = [map_region(region) for region in regions.files]
    for view in mapped:
        view[:] = 7
    regions.close()
    assert not any(view.any() for view in mapped), "a reader that still maps it sees zeros"
    left = tmp_path / "moonpool+c+a+999999999+0"
    left.write_bytes(b"secret" * 1000)
    kept = tmp_path / "link"
    kept.hardlink_to(left)
    assert reclaim(tmp_path, zeroise=True) == 6000 and not left.exists()
    assert not any(kept.read_bytes())
