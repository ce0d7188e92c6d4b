"""Bounds on what pytest-timeout leaves without one: what follows a test's first failure, and the end of the process.

pytest-timeout and pytest's faulthandler take their timers away as soon as a test fails, and an event loop may swallow what
they raise. So every phase of a test, and the end of a session, has a deadline here. Past it all stacks are printed, what the
process started is killed, and the process ends; xdist calls that a crashed worker, and goes on with another one.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from dataclasses import dataclass

import psutil
import pytest

CODE = 70
TEARDOWN_S = 150.0  # more than a cluster may take to stop
ENDING_S = 90.0
GRACE_S = 30.0
"""Of setup and call over pytest-timeout's own, which prints better where it can; of the thread here, before faulthandler."""


@dataclass(frozen=True)
class Deadline:
    what: str
    at: float


class Bound:
    """One deadline at a time, kept by a thread; by faulthandler, too, for a process in which no thread gets to run.

    ``stderr``: a descriptor that is not captured.
    """

    def __init__(self, stderr: int) -> None:
        self._stderr = stderr
        self._deadline: Deadline | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._keep, name="test-bound", daemon=True).start()

    def set(self, what: str, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=self._stderr)
        self._change(Deadline(what, time.monotonic() + seconds))

    def lift(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._change(None)

    def _change(self, deadline: Deadline | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _keep(self) -> None:
        with self._changed:
            while self._deadline is None or time.monotonic() < self._deadline.at:
                self._changed.wait(self._deadline and self._deadline.at - time.monotonic())
            what = self._deadline.what
        os.write(self._stderr, f"\n+++ past its bound: {what}\n".encode())
        faulthandler.dump_traceback(file=self._stderr, all_threads=True)
        started = psutil.Process().children(recursive=True)
        for process in started:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(started, timeout=5)
        os._exit(CODE)


class Bounds:
    """The plugin."""

    def __init__(self, config: pytest.Config, *, teardown_s: float = TEARDOWN_S, ending_s: float = ENDING_S) -> None:
        self._bound = Bound(os.dup(2))  # not captured while plugins are configured
        self._worker = hasattr(config, "workerinput")
        self._test_s = float(config.getini("timeout") or 0)
        self._teardown_s, self._ending_s = teardown_s, ending_s

    def _begin(self, phase: str, item: pytest.Item) -> None:
        marker = item.get_closest_marker("timeout")
        test_s = float(marker.args[0]) if marker else self._test_s
        if test_s:
            self._bound.set(f"{phase} of {item.nodeid}", test_s + GRACE_S)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._begin("setup", item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._begin("call", item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._bound.set(f"teardown of {item.nodeid}", self._teardown_s)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        self._bound.lift()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._bound.set("end of the session", self._ending_s)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """A worker of xdist lives until all are done; any other process has to end now."""
        if self._worker:
            self._bound.lift()
