"""What runs inside a Ray actor's process: one role's shell. Ray calls it for control only, never with tokens or KV."""

from __future__ import annotations

import asyncio
import os

from moonpool.cluster.process import Make, Process
from moonpool.cluster.role_switch import in_kept_role
from moonpool.cluster.spec import RoleSpec

KEPT_LINES = 256


class RoleActor:
    """``run`` is the life of the process's role. A restarted actor is a new object that has to be run again."""

    def __init__(self, spec: str, make: Make) -> None:
        self._spec = in_kept_role(RoleSpec.from_json(spec))
        self._make = make
        self._process: Process | None = None
        self._stopped = False
        self._lines: asyncio.Queue[str] = asyncio.Queue(KEPT_LINES)

    async def pid(self) -> int:
        return os.getpid()

    async def run(self) -> tuple[int, str]:
        """Starts the role and stays until it is stopped: (exit code, why it could not start)."""
        self._loop = asyncio.get_running_loop()
        self._process = Process(self._spec, self._make, self._say)
        if self._stopped:
            self._process.stop()
        return await self._process.live()

    async def stop(self) -> None:
        self._stopped = True
        if self._process:
            self._process.stop()

    async def next_line(self) -> str:
        """The next progress line, as soon as there is one."""
        return await self._lines.get()

    def _say(self, line: str) -> None:
        self._loop.call_soon_threadsafe(self._put, line)

    def _put(self, line: str) -> None:
        if self._lines.full():
            self._lines.get_nowait()
        self._lines.put_nowait(line)
