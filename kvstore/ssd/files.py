"""System calls on the tier's files, and one segment file. ``Io`` is what a test replaces to make the disk fail."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonpool.kvstore.sealing.vault import Vault
from moonpool.kvstore.ssd.format import HEADER_BYTES

Bytes = NDArray[np.uint8]


class Io:
    """Plain system calls; each raises OSError and nothing else. Called from any thread."""

    def open(self, path: Path, *, create: bool, direct: bool) -> int:
        """``create`` makes a file that must not exist yet. Never follows a link; no child process inherits it."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        if direct:
            flags |= os.O_DIRECT
        return os.open(path, flags, 0o600)

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def extend(self, fd: int, size: int) -> None:
        """A file of ``size`` bytes, none of them allocated."""
        os.ftruncate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return os.pwritev(fd, [b.data for b in buffers], offset)

    def preadv(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
        return os.preadv(fd, [b.data for b in buffers], offset)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)


def aligned(size: int) -> Bytes:
    """[size] zeroed uint8, page-aligned as direct I/O wants it."""
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


class SegmentFile:
    """An open segment file. ``direct`` says whether its file system takes direct I/O from and to our memory, ``allocated``
    whether it could set the space aside. Its extents are sealed where it has a ``vault``.
    """

    def __init__(self, io: Io, path: Path, number: int, size: int, fd: int, direct: bool, vault: Vault | None = None) -> None:
        self._io = io
        self.vault = vault
        self._fd = fd
        self.path = path
        self.number = number
        self.size = size
        self.direct = direct
        self.allocated = True

    @classmethod
    def open(
        cls, io: Io, path: Path, number: int, size: int | None, *, create: bool, vault: Vault | None = None
    ) -> SegmentFile:
        """``size`` None: that of the file. All of it is allocated, again where the file has holes. OSError."""
        direct = True
        try:
            fd = io.open(path, create=create, direct=True)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            direct = False  # the file system does not know it; opening may have made the file all the same
            if create:
                path.unlink(missing_ok=True)
            fd = io.open(path, create=create, direct=False)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            if size is None:
                size = io.stat(fd).st_size
            file = cls(io, path, number, size, fd, direct, vault)
            file.grow(size)
            if direct:
                file._require_direct()
            return file
        except OSError:
            os.close(fd)
            if create:
                path.unlink(missing_ok=True)
            raise

    def _require_direct(self) -> None:
        """Some file systems take the flag and refuse the first read or write: then go through the page cache."""
        try:
            self._io.preadv(self._fd, [aligned(HEADER_BYTES)], 0)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.direct = False

    def grow(self, size: int) -> None:
        """Allocate all of ``size`` bytes: what was cut off comes back empty. Where the file system cannot allocate, a
        full disk shows at a write.
        """
        try:
            self._io.allocate(self._fd, size)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self.allocated = False
            if self._io.stat(self._fd).st_size < size:
                self._io.extend(self._fd, size)
        self.size = size

    def intact(self) -> bool:
        """Whether the file still has its name and its length: somebody may have removed or cut it."""
        try:
            found = self._io.stat(self._fd)
        except OSError:
            return False
        return found.st_nlink > 0 and found.st_size >= self.size

    def write(self, buffers: Sequence[Bytes], offset: int) -> None:
        """All of it, or OSError: a short write is EIO."""
        wanted = sum(b.nbytes for b in buffers)
        done = self._io.pwritev(self._fd, buffers, offset)
        if done != wanted:
            raise OSError(errno.EIO, f"{done} of {wanted} bytes written")

    def read(self, buffers: Sequence[Bytes], offset: int) -> int:
        """Bytes read, from the first buffer on; fewer than asked at the end of a cut file."""
        return self._io.preadv(self._fd, buffers, offset)

    def write_header(self, raw: bytes, offset: int = 0) -> None:
        page = aligned(HEADER_BYTES)
        page[:] = np.frombuffer(raw, dtype=np.uint8)
        self.write([page], offset)

    def read_header(self, offset: int = 0) -> bytes:
        page = aligned(HEADER_BYTES)
        return page[: self.read([page], offset)].tobytes()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
