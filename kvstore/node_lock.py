"""One process at a time is the store node of a name in a state folder: a locked file there says which."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from moonpool.core.errors import ConfigError
from moonpool.kvstore.agent import private_folder


def _path(folder: Path, node: str) -> Path:
    return folder / f"{node}.store.lock"


class NodeLock:
    """Made by ``take``; held until ``release`` or the end of the process, however it ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, folder: Path, node: str) -> NodeLock:
        """ConfigError where another process (it is named) is this node, or the folder cannot be used."""
        private_folder(folder)
        path = _path(folder, node)
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as e:
                raise ConfigError(f"cluster.state_dir: cannot open {path}: {e.strerror}", param="cluster.state_dir") from e
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(path, fd):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return cls(path, fd)
            except OSError as e:
                refused = _refused(path, node, fd, e)
                os.close(fd)
                raise refused from e
            os.close(fd)  # its last holder unlinked it before it was locked here

    def release(self) -> None:
        """Again is a no-op."""
        if self._fd >= 0:
            with suppress(OSError):
                if _is(self._path, self._fd):
                    self._path.unlink()  # while it is locked: whoever opened it meanwhile sees that it is gone
            os.close(self._fd)
            self._fd = -1


def _is(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _refused(path: Path, node: str, fd: int, error: OSError) -> ConfigError:
    why = error.strerror or str(error)
    if error.errno == errno.EWOULDBLOCK:
        who = f"process {pid}" if (pid := _written(fd)) else "another process"
        why = f"{who} is the store node {node!r} of this folder; use that one, stop it, or name another folder"
    return ConfigError(f"cluster.state_dir: {path.parent}: {why}", param="cluster.state_dir")


def holder(folder: Path, node: str) -> int:
    """The process that is this node now; 0: none is."""
    try:
        fd = os.open(_path(folder, node), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _written(fd)
    finally:
        os.close(fd)
    return 0


def _written(fd: int) -> int:
    with suppress(ValueError, OSError):
        return int(os.pread(fd, 20, 0))
    return 0
