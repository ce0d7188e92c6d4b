from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
from support.store import LAYOUT

from moonpool.core.config import StoreConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.kvstore.memory_kinds import bind, chosen_node, free_on, memory_nodes, nodes_of, require_on
from moonpool.kvstore.regions import OwnRegions

HERE = memory_nodes()
needs_nodes = pytest.mark.skipif(not HERE, reason="this kernel has no NUMA nodes")


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    (tmp_path / "has_memory").write_text("0-1,4\n")
    (tmp_path / "node4").mkdir()
    (tmp_path / "node4" / "meminfo").write_text("Node 4 MemTotal:  90 kB\nNode 4 MemFree:        70 kB\n")
    return tmp_path


@pytest.fixture
def mapped() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, 64 * mmap.PAGESIZE), np.uint8)


def cxl(node: int, directory: str = "", pool_bytes: int = 0) -> StoreConfig:
    return StoreConfig(memory="cxl", numa_node=node, directory=directory, pool_bytes=pool_bytes)


def test_nodes_and_their_free_memory_are_read(sysfs: Path) -> None:
    assert memory_nodes(sysfs) == [0, 1, 4]
    assert free_on(4, sysfs) == 70 * 1024
    assert free_on(1, sysfs) == 0


def test_an_absent_node_is_refused_with_those_that_exist(sysfs: Path) -> None:
    assert chosen_node(cxl(4), sysfs) == 4
    with pytest.raises(ConfigError, match=r"store\.numa_node: node 7 has no memory here; use one of 0, 1, 4"):
        chosen_node(cxl(7), sysfs)
    with pytest.raises(ConfigError, match=r"store\.numa_node: -1 names no node; use one of 0, 1, 4"):
        chosen_node(cxl(-1), sysfs)


def test_a_kernel_without_nodes_is_told_to_use_dram(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no NUMA nodes"):
        chosen_node(cxl(0), tmp_path)


def test_dram_asks_for_no_node(tmp_path: Path) -> None:
    assert chosen_node(StoreConfig(), tmp_path) is None


def test_a_device_for_a_folder_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"store\.directory: /dev/zero is a device; .*daxctl"):
        chosen_node(StoreConfig(directory="/dev/zero"))


@needs_nodes
def test_touched_pages_lie_on_the_node_they_were_bound_to(mapped: np.ndarray) -> None:
    bind(mapped, HERE[-1])
    assert all(node < 0 for node in nodes_of(mapped, range(0, mapped.nbytes, mmap.PAGESIZE)))
    mapped[:: mmap.PAGESIZE] = 1
    require_on(mapped, HERE[-1], Path("/dev/shm"))


@needs_nodes
def test_pages_on_another_node_are_noticed(mapped: np.ndarray) -> None:
    mapped[:: mmap.PAGESIZE] = 1
    with pytest.raises(ConfigError, match="lie on nodes"):
        require_on(mapped, max(HERE) + 1, Path("/dev/shm"))


@needs_nodes
def test_a_node_that_the_kernel_lacks_cannot_be_bound_to(mapped: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"store\.numa_node: memory cannot be bound to node 63"):
        bind(mapped, 63)


@needs_nodes
def test_region_files_of_the_pool_lie_on_the_configured_node() -> None:
    node = HERE[-1]
    config = cxl(node, pool_bytes=8 * LAYOUT.slot_bytes)
    regions = OwnRegions.create(config, "cxl", NodeId("n"), LAYOUT)
    try:
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        ours = [line for line in maps if regions.files[0].path in line]
        assert ours and all(re.search(rf" bind:{node} .* N{node}=\d+", line) for line in ours)
    finally:
        regions.close()


def test_a_pool_larger_than_what_the_node_has_free_is_refused() -> None:
    if not HERE:
        pytest.skip("this kernel has no NUMA nodes")
    with pytest.raises(ConfigError, match=r"store\.pool_bytes"):
        OwnRegions.create(cxl(HERE[-1], pool_bytes=1 << 50), "cxl", NodeId("n"), LAYOUT)
