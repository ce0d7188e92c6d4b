"""Which memory region files are made of: what the kernel gives, or one NUMA node's (CXL memory is a node without cores).

The pages of a region get their node when they are first touched, so a region is bound between mapping and touching. The
binding is strict (MPOL_BIND) and belongs to the file, so host-mates that map it see the same pages. Not run on CXL
hardware: the calls were tried on ordinary nodes, which the kernel treats alike.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import StoreConfig
from moonpool.core.errors import ConfigError

NODES = Path("/sys/devices/system/node")
CHECKED_PAGES = 256  # of a region, evenly spaced, after it was touched
_CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}  # numbers of mbind and move_pages
_MPOL_BIND = 2
_WORD_BITS = 64
_FREE = re.compile(r"MemFree:\s+(\d+) kB")


def memory_nodes(nodes: Path = NODES) -> list[int]:
    """NUMA nodes that have memory; none where the kernel knows no nodes."""
    try:
        text = (nodes / "has_memory").read_text().strip()
    except OSError:
        return []
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found


def chosen_node(config: StoreConfig, nodes: Path = NODES) -> int | None:
    """The node that region files are to lie on; None: wherever the kernel puts them.

    ConfigError: no node is named, or not one that exists, or ``store.directory`` is a device.
    """
    if config.directory and Path(config.directory).is_char_device():
        raise ConfigError(
            f"store.directory: {config.directory} is a device; name a folder of a file system made on it, or bring it online "
            "as memory (daxctl reconfigure-device --mode=system-ram) and use store.memory = 'cxl'",
            param="store.directory",
        )
    if config.memory == "dram":
        return None
    there = memory_nodes(nodes)
    if config.numa_node not in there:
        named = f"{config.numa_node} names no node" if config.numa_node < 0 else f"node {config.numa_node} has no memory here"
        exist = (
            f"use one of {', '.join(map(str, there))}" if there else "this kernel has no NUMA nodes; use store.memory = 'dram'"
        )
        raise ConfigError(f"store.numa_node: {named}; {exist}", param="store.numa_node")
    return config.numa_node


def free_on(node: int, nodes: Path = NODES) -> int:
    """Free bytes of a node; 0 where the kernel does not say."""
    try:
        found = _FREE.search((nodes / f"node{node}" / "meminfo").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def bind(view: NDArray[np.uint8], node: int) -> None:
    """Pages of the mapping ``view`` not touched yet shall come from ``node`` alone. ConfigError where the kernel refuses."""
    mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = len(mask) * _WORD_BITS + 1  # the kernel looks at one bit fewer
    start, size = ctypes.c_void_p(view.ctypes.data), ctypes.c_ulong(view.nbytes)
    failed = _call(0, start, size, _MPOL_BIND, ctypes.byref(mask), ctypes.c_ulong(bits), 0)
    if failed:
        hint = "; in a container it needs CAP_SYS_NICE or a profile that allows mbind" if failed == errno.EPERM else ""
        raise ConfigError(
            f"store.numa_node: memory cannot be bound to node {node}: {os.strerror(failed)}{hint}", param="store.numa_node"
        )


def nodes_of(view: NDArray[np.uint8], offsets: Sequence[int]) -> list[int]:
    """The node of the page at each byte offset of a mapping; negative: an errno, such as that of a page never touched."""
    pages = (ctypes.c_void_p * len(offsets))(*(view.ctypes.data + offset for offset in offsets))
    status = (ctypes.c_int * len(offsets))()
    failed = _call(1, 0, ctypes.c_ulong(len(offsets)), pages, None, status, 0)
    return [-failed] * len(offsets) if failed else list(status)


def require_on(view: NDArray[np.uint8], node: int, directory: Path) -> None:
    """ConfigError where touched pages of ``view`` lie on another node: a file system that keeps its own memory."""
    step = max(view.nbytes // CHECKED_PAGES // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    found = set(nodes_of(view, range(0, view.nbytes, step)))
    if found != {node}:
        raise ConfigError(
            f"store.directory: pages of {directory} lie on nodes {sorted(found)}, not on {node}; use a memory file system "
            "(tmpfs) with store.memory = 'cxl'",
            param="store.directory",
        )


def _call(which: int, *arguments: object) -> int:
    """mbind (0) or move_pages (1); 0, or an errno."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.syscall(numbers[which], *arguments) != 0 else 0
