"""A lock between processes whose waiting has an end: ``flock`` on a file. The kernel frees it when its holder dies.

``flock`` itself has no time limit and polling would steal time from whoever computes, so a thread of its own stands in line. It
is there from the first wait on, and sleeps.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path


class TimedLock:
    """For one thread at a time. Every instance is a holder of its own, also within one process."""

    def __init__(self, path: Path) -> None:
        """OSError where the file cannot be made."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mutex = threading.Lock()
        self._asked = threading.Semaphore(0)
        self._granted = threading.Event()
        self._in_line = False  # the thread waits, or holds the lock for ``acquire``
        self._given_up = False  # nobody wants what it waits for
        self._closed = False
        self._thread: threading.Thread | None = None

    def acquire(self, limit_s: float) -> bool:
        """False: not within ``limit_s``; and at once while the holder of that time has not let go since."""
        with self._mutex:
            if self._in_line:
                return False
        if self._try():
            return True
        if limit_s <= 0.0:
            return False
        self._stand_in_line()
        got = self._granted.wait(limit_s)
        with self._mutex:
            got = got or self._granted.is_set()
            self._in_line = not got
            self._given_up = not got
        return got

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Not held. A thread that still stands in line ends when the holder lets go."""
        with self._mutex:
            self._closed = True
            thread, waits = self._thread, self._in_line
        self._asked.release()
        if thread is None:
            os.close(self._fd)
        elif not waits:
            thread.join()

    def _try(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _stand_in_line(self) -> None:
        with self._mutex:
            self._in_line = True
            self._granted.clear()
            if self._thread is None:  # a daemon: a frozen holder must not keep this process from ending
                self._thread = threading.Thread(target=self._wait, name="permit", daemon=True)
                self._thread.start()
        self._asked.release()

    def _wait(self) -> None:
        while True:
            self._asked.acquire()
            if self._closed and not self._in_line:
                break
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            with self._mutex:
                if self._given_up:
                    self.release()
                    self._given_up = self._in_line = False
                else:
                    self._granted.set()
        os.close(self._fd)
