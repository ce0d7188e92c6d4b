"""What the control groups of a process allow it: a container's memory and share of the cores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Group:
    """Limits of this process's control group and all above it. None: no limit."""

    memory: int | None = None  # bytes
    used: int = 0  # of the group that limits memory
    cores: float | None = None


def control_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Group:
    """Version 2, or version 1 in a container. ``own`` names the group of this process."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return Group()
    unified = next((line[3:] for line in lines if line.startswith("0::")), None)
    if unified is not None and (root / "cgroup.controllers").exists():
        return _version_2(root, root / unified.lstrip("/"))
    limit = _number(root / "memory/memory.limit_in_bytes")
    quota, period = _number(root / "cpu/cpu.cfs_quota_us"), _number(root / "cpu/cpu.cfs_period_us")
    return Group(
        None if limit is None or limit >= 1 << 60 else limit,
        _number(root / "memory/memory.usage_in_bytes") or 0,
        quota / period if quota and quota > 0 and period else None,
    )


def _version_2(root: Path, group: Path) -> Group:
    found = Group()
    for folder in (group, *group.parents):
        limit = _number(folder / "memory.max")
        if limit is not None and (found.memory is None or limit < found.memory):
            found = Group(limit, _number(folder / "memory.current") or 0, found.cores)
        quota = _quota(folder / "cpu.max")
        if quota is not None and (found.cores is None or quota < found.cores):
            found = Group(found.memory, found.used, quota)
        if folder == root:
            break
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
