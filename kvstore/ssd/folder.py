"""The folder of one node's tier: locked for life, mode 0700; segment files in it are made, found and removed here."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId, checked_name
from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.ssd.device import Device, size_words
from moonpool.kvstore.ssd.files import Io, SegmentFile
from moonpool.kvstore.ssd.format import HEADER_BYTES

LARGEST_SEGMENT = 256 * MIB
SEGMENTS = 8  # at least, so that formatting or losing one costs little
_NAME = re.compile(r"segment-(\d{6,12})\Z")


def segment_size(cap: int) -> int:
    """Bytes of one segment file of a tier of ``cap`` bytes."""
    return min(LARGEST_SEGMENT, cap // SEGMENTS) // HEADER_BYTES * HEADER_BYTES


class Folder:
    """``lock`` is an open, locked file; whoever holds it owns every segment file of the folder. With a ``vault`` its files
    are sealed.
    """

    def __init__(self, io: Io, path: Path, lock: int, vault: Vault | None = None) -> None:
        self._io = io
        self._vault = vault
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, io: Io, ssd_path: str, node: NodeId, vault: Vault | None = None) -> Folder:
        """ConfigError naming the folder: another process has it, or it cannot be made or written."""
        path = Path(ssd_path) / checked_name(node, "node")
        try:
            return cls(io, path, _locked(path), vault)
        except BlockingIOError as e:
            raise ConfigError(
                f"store.ssd_path: {path} is in use by another process; give every store node its own name or its own path",
                param="store.ssd_path",
            ) from e
        except OSError as e:
            raise ConfigError(
                f"store.ssd_path: {path}: {e.strerror}; name a folder that this user can write", param="store.ssd_path"
            ) from e

    def cap(self, ssd_bytes: int) -> int:
        """Bytes the tier may fill: as configured, or a share of what is free, own files included and kept.

        ConfigError: the file system could hold ``ssd_bytes``, others fill it, and no earlier life of the tier has files here.
        A file system smaller than ``ssd_bytes`` is no error: the tier takes what it may.
        """
        fs = Device.of(self.path)
        own = [os.lstat(path) for _, path in self.found()]
        if ssd_bytes:
            if not own and fs.spare < ssd_bytes <= fs.total:
                raise ConfigError(
                    f"store.ssd_bytes: {ssd_bytes} bytes ({size_words(ssd_bytes)}) are more than {self.path} has: "
                    f"{size_words(fs.free)} of {size_words(fs.total)} are free, of which {size_words(fs.spared)} stay free for "
                    f"others; {f'use {fs.spare} or less, ' if fs.spare else ''}make room there, or name another file system in "
                    "store.ssd_path",
                    param="store.ssd_bytes",
                )
            return ssd_bytes
        return fs.default(sum(file.st_blocks * 512 for file in own), sum(file.st_size for file in own))

    def found(self) -> list[tuple[int, Path]]:
        """(number, path) of every segment file, ascending. Files of other names are nobody's business."""
        matches = ((_NAME.match(path.name), path) for path in self.path.iterdir())
        return sorted((int(match[1]), path) for match, path in matches if match is not None)

    def path_of(self, number: int) -> Path:
        return self.path / f"segment-{number:06}"

    def make(self, number: int, size: int) -> SegmentFile:
        """A new segment file, allocated. OSError: nothing is left of it."""
        return SegmentFile.open(self._io, self.path_of(number), number, size, create=True, vault=self._vault)

    def restore(self) -> None:
        """Make and lock the folder again where somebody removed it. OSError where that cannot be."""
        if self._lock >= 0 and os.fstat(self._lock).st_nlink > 0:
            return
        lock = _locked(self.path)
        self.close()
        self._lock = lock

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(path: Path) -> int:
    """An open file of the folder, locked. BlockingIOError: another process has it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 0:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # removed between opening and locking
