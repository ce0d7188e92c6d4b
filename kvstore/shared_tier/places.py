"""Where objects lie: a folder that all nodes mount. Called from the tier's threads; every fault is an OSError."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId

Bytes = NDArray[np.uint8]
NOT_OURS = (errno.ELOOP, errno.EACCES)  # a link, or somebody else's file, under a block's name
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
UNFINISHED = "unfinished"  # folder of files that are being written


def _unfit(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"store.shared_path: {path}: {why}; name a folder that every store node can write, by its absolute path, "
        "or s3://bucket/prefix",
        param="store.shared_path",
    )


class Objects(Protocol):
    """Names are relative, with slashes. OSError: the store cannot be reached, or refuses."""

    def size(self, name: str) -> int | None:
        """Bytes of the object; None where there is none."""

    def get(self, name: str, size: int) -> Bytes | None:
        """Its bytes; none of them (an empty array) where it has another size; None where there is no object."""

    def put(self, name: str, data: Bytes) -> None:
        """All of it or nothing is seen under the name, from now on; an object of that name is replaced."""

    def remove(self, name: str) -> bool:
        """Whether there was one."""


class Folder:
    """Objects as files. A file is written beside and renamed, so no reader ever sees half of one."""

    def __init__(self, root: Path, node: NodeId) -> None:
        self._root = root
        self._mine = f"{node}+"
        self._numbers = itertools.count()

    @classmethod
    def open(cls, path: str, node: NodeId) -> Folder:
        """Removes what an earlier life of this node left unfinished.

        ConfigError: not the absolute path of a folder that can be written, or nothing is there (a mount that is missing).
        """
        if (scheme := _SCHEME.match(path)) is not None:
            raise _unfit(path, f"{scheme[0]} is nothing that blocks can be shared through")
        if not Path(path).is_absolute():
            raise _unfit(path, "is relative, and store nodes run in folders of their own")
        folder = cls(Path(path), node)
        try:
            if not os.path.lexists(path):
                raise ConfigError(
                    f"store.shared_path: {path}: there is no such folder; mount it, or create it if it is meant to be new",
                    param="store.shared_path",
                )
            unfinished = folder._root / UNFINISHED
            unfinished.mkdir(mode=0o700, exist_ok=True)
            for left in unfinished.glob(f"{folder._mine}*"):
                left.unlink(missing_ok=True)
            probe = unfinished / f"{folder._mine}{os.getpid()}+probe"
            probe.touch(mode=0o600)
            probe.unlink()
        except OSError as e:
            raise _unfit(path, e.strerror or "no folder") from e
        return folder

    def size(self, name: str) -> int | None:
        try:
            found = os.lstat(self._root / name)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def get(self, name: str, size: int) -> Bytes | None:
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno in NOT_OURS:
                return np.empty(0, np.uint8)
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                return np.empty(0, np.uint8)
            out = np.empty(size, np.uint8)
            at = 0
            while at < size and (n := os.preadv(fd, [out[at:].data], at)):
                at += n
            return out[:at]
        finally:
            os.close(fd)

    def put(self, name: str, data: Bytes) -> None:
        beside = self._root / UNFINISHED / f"{self._mine}{os.getpid()}+{next(self._numbers)}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                at = 0
                while at < data.nbytes:
                    at += os.pwrite(fd, data[at:].data, at)
            finally:
                os.close(fd)  # network file systems report late errors here
            self._rename(beside, self._root / name)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def remove(self, name: str) -> bool:
        try:
            os.unlink(self._root / name)
        except FileNotFoundError:
            return False
        return True

    def _rename(self, beside: Path, to: Path) -> None:
        try:
            os.rename(beside, to)
        except FileNotFoundError:  # the first block of its folder
            for folder in (to.parent.parent, to.parent):
                if folder != self._root:
                    folder.mkdir(mode=0o700, exist_ok=True)
            os.rename(beside, to)
