"""The file system below the tier's folder: how much of it the tier may take. Others write there too."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from moonpool.core.config import GIB, MIB

DEFAULT_SHARE = 0.25  # of what is free
LARGEST_DEFAULT = 64 * GIB
SPARED_SHARE = 0.05  # never taken
SPARED = GIB  # at least, where the file system is larger than ``SMALL_DEVICE``
SMALL_DEVICE = 10 * GIB


@dataclass(frozen=True)
class Device:
    """Bytes of a file system. ``free``: what this user may still write."""

    total: int
    free: int

    @classmethod
    def of(cls, path: Path) -> Device:
        fs = os.statvfs(path)
        return cls(fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize)

    @property
    def spared(self) -> int:
        """To stay free for others."""
        return max(int(self.total * SPARED_SHARE), SPARED if self.total > SMALL_DEVICE else 0)

    @property
    def spare(self) -> int:
        """What the tier may take."""
        return max(self.free - self.spared, 0)

    def default(self, filled: int, kept: int) -> int:
        """Bytes of a tier whose size nobody named. It has ``filled`` bytes already, in files of ``kept`` bytes."""
        return min(max(int((self.free + filled) * DEFAULT_SHARE), kept), LARGEST_DEFAULT)

    def require(self, size: int, left: int | None = None) -> None:
        """OSError: ``size`` bytes more would take of what stays free, or are more than ``left``, the caller's own count."""
        if size > self.spare or (left is not None and size > left):
            raise OSError(errno.ENOSPC, f"{size_words(self.spared)} of the file system stay free for others")


def size_words(size: int) -> str:
    """For people: MiB, GiB or TiB with one digit after the point."""
    unit, name = next(((u, n) for u, n in ((1 << 40, "TiB"), (GIB, "GiB")) if size >= u), (MIB, "MiB"))
    return f"{size / unit:.1f} {name}"
