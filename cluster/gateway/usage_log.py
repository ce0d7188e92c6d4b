"""A line of JSON about every request at its end: who took how much of which model. Never a prompt, an answer or a key.

The event loop only queues; a thread of its own writes. Where the queue is full or the disk does not take it, lines are
dropped and counted, and serving goes on. Several gateways may write one file: each line is one append, and whoever finds
that the file was begun anew (by another gateway, or by logrotate) opens the new one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import queue
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from moonpool.core.errors import ConfigError

QUEUED = 8_192  # lines: a second and more of a disk that stands still
AT_ONCE = 256  # lines in one append
CLOSE_S = 2.0  # a disk that stands still does not hold up an end for longer
MODE = 0o640
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UsageLine:
    """``time`` is ISO 8601 in UTC. ``model`` is the served model's own name; empty where the request named none.

    Tokens are as the tenant is charged: a refused request took none. ``ttft_ms`` is None without a first token.
    """

    time: str
    id: str
    tenant: str
    model: str
    endpoint: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    choices: int
    attempts: int
    ttft_ms: float | None
    duration_ms: float
    gateway: str


class UsageLog:
    """``limit`` bytes, then the file is begun anew and the last ``keep`` full ones stay as FILE.1 (the newest), FILE.2, ..."""

    def __init__(self, path: Path, *, limit: int, keep: int, queued: int = QUEUED) -> None:
        self._path, self._limit, self._keep = path, limit, keep
        self._queue: queue.Queue[UsageLine | None] = queue.Queue(queued)
        self._fd: int | None = None
        self._complained = False
        self.written = 0
        self.dropped = 0  # the queue was full, or the disk did not take them
        self._thread = threading.Thread(target=self._run, name="gateway-usage-log", daemon=True)
        self._thread.start()

    def add(self, line: UsageLine) -> None:
        """Never waits."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes what is queued, for a short while."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    # the thread

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            lines, ends = [first], False
            while len(lines) < AT_ONCE and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    ends = True
                    break
                lines.append(following)
            self._write(lines)
            if ends:
                break
        self._shut()

    def _write(self, lines: list[UsageLine]) -> None:
        text = "".join(json.dumps(asdict(line), separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            self._append(text)
        except OSError as e:
            self.dropped += len(lines)
            self._shut()
            if not self._complained:
                self._complained = True
                _log.warning("usage not logged", file=str(self._path), error=e.strerror)
            return
        self.written += len(lines)
        if self._complained:
            self._complained = False
            _log.info("usage logged again", file=str(self._path), dropped=self.dropped)

    def _append(self, text: bytes) -> None:
        """All of it or, as far as this process can tell, nothing."""
        fd = self._current(len(text))
        with _locked(fd):
            size = os.fstat(fd).st_size
            try:
                if os.write(fd, text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(fd, size)  # half a line would spoil the next one
                raise

    def _current(self, more: int) -> int:
        """The file to write ``more`` bytes to, opened or begun anew where that is due."""
        fd = self._fd
        if fd is not None and self._is_ours(fd) and os.fstat(fd).st_size + more <= self._limit:
            return fd
        if fd is not None and self._is_ours(fd) and os.fstat(fd).st_size:
            with _locked(fd):
                if self._is_ours(fd):  # else another gateway was first
                    self._shift()
        self._shut()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        return self._fd

    def _is_ours(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False

    def _shift(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older = numbered(self._path, number)
            if older.exists():
                os.replace(older, numbered(self._path, number + 1))
        os.replace(self._path, numbered(self._path, 1))

    def _shut(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def require_writable(path: Path) -> None:
    """ConfigError where this process may not write there; that a disk is full now says nothing about later."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE))
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"gateway.usage_log: cannot write {path}: {e.strerror}; name a file that this user may write",
                param="gateway.usage_log",
            ) from e


def numbered(path: Path, number: int) -> Path:
    """The full file that was begun anew ``number`` times ago."""
    return path.with_name(f"{path.name}.{number}")


class _locked:
    """Holds a file's lock against other gateways' threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *exc: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
