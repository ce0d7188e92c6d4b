"""Region files: the store node's memory, shared with the workers of its host through a memory file system.

A file is named after its owner (cluster, node, process id) and locked by it for life, so that a later start can tell
files of dead owners, which it removes, from those of live ones, which it never touches. All memory is allocated and
touched before the node serves: a page of tmpfs that cannot be had is an error at start, not a bus error in mid-copy.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from moonpool.core.config import MIB, StoreConfig
from moonpool.core.errors import ConfigError, TransferFailed
from moonpool.core.ids import NodeId
from moonpool.core.landing import Region
from moonpool.core.layout import KVLayout
from moonpool.kvstore.memory_kinds import bind, chosen_node, free_on, require_on

DEFAULT_DIRECTORY = Path("/dev/shm")
STEP = 64 * MIB  # allocated and touched between two reports of progress
SPARE = 0.02  # of the file system, left to others
_NAME = re.compile(r"moonpool\+[A-Za-z0-9._-]+\+[A-Za-z0-9._-]+\+(\d+)\+\d+\Z")

Progress = Callable[[int, int], None]
"""(bytes touched so far, bytes in all)"""


def _gb(n: float) -> str:
    return f"{n / 1e9:.2f} GB"


def free_memory() -> int:
    """Bytes this process may still use: the machine's, or less where the control group has a lower limit."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group of version 2 here: the machine's figure stands
    return max(free, 0)


def plan(config: StoreConfig, slot_bytes: int, free: int, space: int) -> list[int]:
    """Slots of each region. ``free`` bytes of memory and ``space`` bytes of the file system are there to be used.

    ConfigError, with the numbers, where the configured pool does not fit or holds no slot.
    """
    wanted = config.pool_bytes or min(free // 2, int(space * (1 - SPARE)))
    fits = min(free, space)
    if config.region_bytes < slot_bytes:
        raise ConfigError(
            f"store.region_bytes: {config.region_bytes} holds not one block of {slot_bytes} bytes, digests included; "
            f"use {slot_bytes} or more",
            param="store.region_bytes",
        )
    if wanted > fits:
        raise ConfigError(
            f"store.pool_bytes: {_gb(wanted)} wanted, but {_gb(free)} of memory and {_gb(space)} of the memory file system "
            f"are free; use at most {fits >> 20} MiB, or set store.directory to a larger memory file system",
            param="store.pool_bytes",
        )
    slots = wanted // slot_bytes
    if slots == 0:
        raise ConfigError(
            f"store.pool_bytes: {wanted} bytes hold no slot of {slot_bytes} bytes; use {slot_bytes} or more",
            param="store.pool_bytes",
        )
    per_region = config.region_bytes // slot_bytes
    return [min(per_region, slots - first) for first in range(0, slots, per_region)]


def _owner_lives(path: Path, pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).create_time() <= path.stat().st_mtime + 1)  # else: its number was given out again
    except (psutil.NoSuchProcess, OSError):
        return False


def reclaim(directory: Path, zeroise: bool = False) -> int:
    """Remove region files whose owner is dead; returns the bytes they held. Other people's files are left alone.

    ``zeroise``: what they held is overwritten first; who still maps one reads zeros.
    """
    freed = 0
    for path in directory.glob("moonpool+*"):
        match = _NAME.match(path.name)
        if match is None or _owner_lives(path, int(match[1])):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an owner in another PID namespace holds it
            size = found.st_size
            freed += size
            if zeroise and size:
                np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=np.uint8)[:] = 0
            path.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            os.close(fd)
    return freed


class OwnRegions:
    """The owner's side. ``files`` are what others map, ``views`` the same bytes here, both by region number."""

    def __init__(
        self,
        directory: Path,
        owner: str,
        slot_bytes: int,
        slots_per_region: Sequence[int],
        memory_node: int | None = None,
        zeroise: bool = False,
    ) -> None:
        self.files: list[Region] = []
        self.views: list[NDArray[np.uint8]] = []
        self.slots_per_region = tuple(slots_per_region)
        self._locks: list[int] = []  # open files, locked as long as this process owns them
        self._directory = directory
        self._owner = owner
        self._slot_bytes = slot_bytes
        self._zeroise = zeroise  # at ``close``
        self._memory_node = memory_node  # NUMA node of every page; None: the kernel's choice

    @classmethod
    def create(
        cls,
        config: StoreConfig,
        cluster: str,
        node: NodeId,
        layout: KVLayout,
        progress: Progress | None = None,
        zeroise: bool = False,
    ) -> OwnRegions:
        """Reclaim, check, allocate, map and touch. Takes about 0.3 s per GB; call it in a thread. ConfigError with numbers."""
        directory = Path(config.directory) if config.directory else DEFAULT_DIRECTORY
        memory_node = chosen_node(config)
        free = free_memory() if memory_node is None else min(free_memory(), free_on(memory_node))
        try:
            reclaim(directory, zeroise)
            fs = os.statvfs(directory)
        except OSError as e:
            raise ConfigError(
                f"store.directory: {directory}: {e.strerror}; name a writable folder on a memory file system",
                param="store.directory",
            ) from e
        slots = plan(config, layout.slot_bytes, free, fs.f_bavail * fs.f_frsize)
        owner = f"moonpool+{cluster}+{node}+{os.getpid()}"
        regions = cls(directory, owner, layout.slot_bytes, slots, memory_node, zeroise)
        try:
            regions._fill(progress or (lambda done, total: None))
        except OSError as e:
            regions.close()
            raise ConfigError(
                f"store.pool_bytes: {_gb(sum(slots) * layout.slot_bytes)} could not be had in {directory}: {e.strerror}; "
                "use less, or a larger memory file system",
                param="store.pool_bytes" if e.errno == errno.ENOSPC else "store.directory",
            ) from e
        except BaseException:
            regions.close()
            raise
        return regions

    def _fill(self, progress: Progress) -> None:
        total = sum(self.slots_per_region) * self._slot_bytes
        done = 0
        for number, slots in enumerate(self.slots_per_region):
            size = slots * self._slot_bytes
            path = self._directory / f"{self._owner}+{number}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._locks.append(fd)
            self.files.append(Region(number, str(path), size, self._slot_bytes))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, size)
            view = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=np.uint8)
            self.views.append(view)
            if self._memory_node is not None:
                bind(view, self._memory_node)
            for start in range(0, size, STEP):
                end = min(start + STEP, size)
                os.posix_fallocate(fd, start, end - start)  # out of space is an error here and a bus error below
                view[start : end : mmap.PAGESIZE] = 0
                done += end - start
                progress(done, total)
            if self._memory_node is not None:
                require_on(view, self._memory_node, self._directory)

    def close(self) -> None:
        """Unlink. The memory itself goes with the last view; call it after every carrier has let go of it."""
        for view in self.views if self._zeroise else ():
            view[:] = 0
        for region in self.files:
            Path(region.path).unlink(missing_ok=True)
        for fd in self._locks:
            os.close(fd)
        self.files, self.views, self._locks = [], [], []


def map_region(region: Region) -> NDArray[np.uint8]:
    """A host-mate's writable view of ``region``, [size] uint8. The mapping goes with the last view.

    TransferFailed where the file is gone, has another name than region files, is not a plain file of this user, or is smaller
    than its owner says: whoever names it may be lying, and what is mapped is written into.
    """
    if _NAME.match(Path(region.path).name) is None:
        raise TransferFailed(f"region {region.number}: {region.path} is not called as region files are")
    try:
        fd = os.open(region.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise TransferFailed(f"region {region.number}: cannot open {region.path}: {e.strerror}") from e
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size < region.size or not region.size:
            raise TransferFailed(
                f"region {region.number}: {region.path} is not a plain file of this user with {region.size} bytes"
            )
        return np.frombuffer(mmap.mmap(fd, region.size, mmap.MAP_SHARED), dtype=np.uint8)
    except OSError as e:
        raise TransferFailed(f"region {region.number}: cannot map {region.path}: {e.strerror}") from e
    finally:
        os.close(fd)
