"""The other ranks of a worker: child processes, started before the model is loaded, and gone with whoever started them.

One thread starts them and waits for their ends. It lives as long as they do, because the kernel ends a child when the *thread*
that started it has ended (PR_SET_PDEATHSIG). A rank that ends by itself is not started again: its weights are gone, and what
the step under way wrote is not known. Whoever asked hears of it (``lost``), to end the whole worker.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from moonpool.core.errors import ConfigError, PeerSilent
from moonpool.engine.tensor_parallel.keeping import TOGETHER, Keeping
from moonpool.engine.tensor_parallel.line import Line, Sums
from moonpool.engine.tensor_parallel.shared_pages import SharedPages

STEP_S = 300.0  # within one step a rank waits no longer for another
HOOK_S = 60.0  # nor so much longer than a hook of rank 0, which waits for K/V from elsewhere as long as a request lives
END_S = 3.0  # for a rank to end in order
TOLD_S = 1.0  # between the end of a rank and that it is known
LOOK_S = 1.0  # between two looks at whether a rank was stopped, which nothing tells; as many in a row have to say so:
_LOOKS = 3  # one may have been stopped and let go again between two
_MODULE = "moonpool.engine.tensor_parallel"
log = logging.getLogger(__name__)


def meeting_folder(sums: Sums) -> Path | None:
    """Where ranks find one another, mode 0700; None: they share memory, and have no need to."""
    return None if sums == "memory" else Path(tempfile.mkdtemp(prefix="moonpool-ranks-"))


class Ranks:
    """Ranks 1 and above of one worker. ``lost`` has a result once one has ended by itself: which, and how.

    ``moves``: a second line to each, where they keep pages apart.
    """

    def __init__(self, count: int, sums: Sums, keeping: Keeping, command: Sequence[str], step_s: float = STEP_S) -> None:
        """``step_s``: within one step a rank waits no longer for another."""
        self.count, self.sums, self.keeping, self.step_s = count, sums, keeping, step_s
        self.folder = meeting_folder(sums)
        self.lost: Future[str] = Future()
        self.lines: list[Line] = []
        self.moves: list[Line] = []
        self.pages: SharedPages | None = None
        self.pids: list[int] = []
        self._command = tuple(command)
        self._closing = threading.Event()
        self._losing = threading.Lock()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        self._started: Future[None] = Future()
        self._keeper = threading.Thread(target=self._keep, name="ranks", daemon=True)
        self._keeper.start()

    @classmethod
    def start(cls, count: int, sums: Sums, keeping: Keeping = TOGETHER, waits_s: float = 0.0) -> Ranks:
        """``count`` ranks beside this process, rank 0, that add up by ``sums``. ConfigError where one cannot be started.

        ``waits_s``: so long a hook of rank 0 may wait within a step.
        """
        ranks = None
        try:
            ranks = cls(count, sums, keeping, (sys.executable, "-m", _MODULE), max(STEP_S, waits_s + HOOK_S))
            ranks._started.result()
        except Exception as e:
            if ranks is not None:
                ranks.close()
            raise ConfigError(f"engine.tensor_parallel: a rank cannot be started: {e}", param="engine.tensor_parallel") from e
        return ranks

    def share_pages(self, size: int) -> torch.Tensor:
        """``size`` bytes of zeros that every rank will map: pages, or where these are ``apart`` the host's view of them.

        ConfigError where they cannot be had.
        """
        self.pages = SharedPages.create(size, self.count + 1)
        return self.pages.bytes

    def open_moves(self, line: Line) -> None:
        """One more, to the rank at the end of ``line``."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self.step_s)
        self.moves.append(Line(ours))
        with theirs:
            line.send_fd(theirs.fileno())

    def require(self) -> None:
        """PeerSilent where a rank has ended."""
        if self.lost.done():
            raise PeerSilent(self.lost.result())

    def gone(self, error: BaseException) -> PeerSilent:
        """What a step ends with that met ``error`` on its way to another rank. No step after it is computed."""
        try:
            return PeerSilent(self.lost.result(TOLD_S))
        except TimeoutError:
            self.lose(f"a rank of this worker does not answer: {error}")
        return PeerSilent(self.lost.result())

    def remove_folder(self) -> None:
        """All have found one another, and need it no longer."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """They end in order within ``END_S``, or are killed; no process is left. A second call does nothing: whoever failed to
        load has closed the backend, which owns them, and then what it got."""
        if self._closing.is_set():
            return
        self._closing.set()
        for line in self.lines:
            try:
                line.send_end(END_S)
            except OSError:
                pass  # it has ended
        os.close(self._woken)
        self._keeper.join()
        for line in (*self.lines, *self.moves):
            line.close()
        os.close(self._wake)
        if self.pages is not None:
            self.pages.close()
            self.pages = None
        self.remove_folder()

    def lose(self, why: str) -> None:
        """No step after this is computed, and whoever has them ends. The first reason stays."""
        with self._losing:
            if not self.lost.done():
                self.lost.set_result(why)

    def _keep(self) -> None:
        children: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(self.count):
                children.append(self._start_one())
            self.pids = [child.pid for child in children]
            self._started.set_result(None)
            self._watch(children)
        except Exception as e:  # whatever it is: somebody waits for the start, and later on for word of an end
            if self._started.done():
                log.exception("ranks cannot be watched")
                self.lose(f"the ranks of this worker cannot be watched: {e}")
            else:
                self._started.set_exception(e)
        finally:
            _end(children, END_S if self._closing.is_set() else 0.0)

    def _start_one(self) -> subprocess.Popen[bytes]:
        ours, theirs = socket.socketpair()
        ours.settimeout(self.step_s)
        self.lines.append(Line(ours))
        with theirs:
            return subprocess.Popen(
                (*self._command, str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what it has to say is an error
                pass_fds=(theirs.fileno(),),
            )

    def _watch(self, children: list[subprocess.Popen[bytes]]) -> None:
        """Until one has ended or is stopped (SIGSTOP), or ``close`` was called. For one that is stopped a step would wait until
        the worker counts as standing still, and so would every request here."""
        poll = select.poll()
        ends = {os.pidfd_open(child.pid): number for number, child in enumerate(children)}
        for fd in (self._wake, *ends):
            poll.register(fd, select.POLLIN)
        seen: Counter[int] = Counter()  # looks in a row at which a rank was stopped
        while not (found := {fd for fd, _ in poll.poll(LOOK_S * 1e3)}):
            seen = Counter({n: seen[n] + 1 for n, child in enumerate(children) if _is_stopped(child.pid)})
            if seen and max(seen.values()) >= _LOOKS:
                number = max(seen, key=seen.__getitem__)
                self.lose(f"rank {number + 1} of this worker (process {children[number].pid}) was stopped")
                break
        for fd, number in ends.items():
            if fd in found and not self._closing.is_set():
                code = children[number].wait()
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                self.lose(f"rank {number + 1} of this worker (process {children[number].pid}) has ended: {how}")
            os.close(fd)


def _is_stopped(pid: int) -> bool:
    """By a signal, not by a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _end(children: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    """``limit_s``: for all of them together."""
    until = time.monotonic() + limit_s
    for child in children:
        try:
            child.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
