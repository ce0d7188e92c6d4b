"""One role as a process of its own: what the operating system tells it, and its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from moonpool.cluster.furnishing import furnish
from moonpool.cluster.process import Make, Process, Say
from moonpool.cluster.spec import RoleSpec


async def run_role(spec: RoleSpec, make: Make, say: Say, *, lifeline: int | None = None) -> NoReturn:
    """One process's whole life, and its end with its exit code. It ends in order on SIGTERM, SIGINT or ``Admin.Stop``; a second
    signal ends it at once.

    ``lifeline`` is a descriptor whose other end its launcher holds: the launcher's death is then a reason to stop, too.
    """
    furnish(spec)
    process = Process(spec, make, say)
    heed = _Signals(process)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, heed)
    if lifeline is not None:
        asyncio.get_running_loop().add_reader(lifeline, _read_lifeline, lifeline, process)
    code, why = await process.live()
    if why:
        print(f"{spec.member}: {why}", file=sys.stderr, flush=True)
    # Everything is put away. What an interpreter does at its end (threads that still load, modules taken apart) is for nobody,
    # and takes seconds in which its launcher waits.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Signals:
    """Heeded between two byte codes of the main thread, also while the event loop is busy."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            os._exit(128 + number)
        self._heard = True
        self._loop.call_soon_threadsafe(self._process.stop, 128 + number)


def _read_lifeline(lifeline: int, process: Process) -> None:
    if not os.read(lifeline, 4096):
        asyncio.get_running_loop().remove_reader(lifeline)
        process.stop()
