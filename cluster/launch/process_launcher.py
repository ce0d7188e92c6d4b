"""Starts roles as plain child processes and starts them again when they die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from moonpool.cluster.launch.plan import ends
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.process import EXIT_BAD_START, EXIT_RESTART, EXIT_STOPPED, READY, Say
from moonpool.cluster.spec import RoleSpec
from moonpool.core.ids import MemberId

BACKOFF_S = (0.2, 5.0)
STABLE_S = 30.0  # a life this long starts the back-off anew

Command = Callable[[Path], Sequence[str]]


def run_command(spec_file: Path) -> Sequence[str]:
    return (sys.executable, "-m", "moonpool.cli.main", "run", "--spec", str(spec_file))


class ProcessLauncher:
    """``say`` takes progress lines; ``failed(member, why)`` is called once when a member is given up.

    Every child holds the reading end of a pipe as its standard input: it stops in order when the launcher dies.
    """

    def __init__(
        self,
        state: StateDir,
        say: Say,
        failed: Callable[[MemberId, str], None],
        *,
        max_restarts: int,
        command: Command = run_command,
    ) -> None:
        self._state, self._say, self._failed = state, say, failed
        self._max_restarts, self._command = max_restarts, command
        self._children: dict[MemberId, Process] = {}
        self._specs: dict[MemberId, RoleSpec] = {}
        self._keepers: dict[MemberId, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()

    async def open(self) -> None:
        (self._state.path / "specs").mkdir(exist_ok=True)

    async def start(self, spec: RoleSpec) -> None:
        file = self._state.path / "specs" / f"{spec.member}.json"
        file.write_text(spec.to_json(), encoding="utf-8")
        self._specs[spec.member] = spec
        self._keepers[spec.member] = asyncio.create_task(self._keep(spec, file), name=f"keep-{spec.member}")

    async def stop(self) -> None:
        """Stops everybody in the order of ``plan.ends``; kills who does not listen."""
        self._stopping.set()
        if self._specs:
            config = next(iter(self._specs.values())).config
            for stage, limit_s in ends(config, ((member, spec.role) for member, spec in self._specs.items())):
                await self._stop([c for member in stage if (c := self._children.get(member))], limit_s)
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    async def _stop(self, children: list[Process], limit_s: float) -> None:
        for child in children:
            _signal(child, signal.SIGTERM)
        waits = [asyncio.create_task(child.wait()) for child in children if child.returncode is None]
        if waits:
            await asyncio.wait(waits, timeout=limit_s)
        for member, child in self._children.items():
            if child in children and child.returncode is None:
                self._say(f"[{member}] does not stop; killed")
                _signal(child, signal.SIGKILL)
        await asyncio.gather(*waits, return_exceptions=True)

    async def _keep(self, spec: RoleSpec, file: Path) -> None:
        delay, restarts, served = BACKOFF_S[0], 0, False
        while not self._stopping.is_set():
            began = time.monotonic()
            code, last, was_ready = await self._live(spec, file)
            served = served or was_ready
            if self._stopping.is_set() or code == EXIT_STOPPED:
                return
            if code == EXIT_RESTART:
                self._say(f"[{spec.member}] left, to be started anew")
                continue
            if code == EXIT_BAD_START and not served:
                self._failed(spec.member, last or "it ended without a word")
                return
            if restarts >= self._max_restarts:
                self._failed(spec.member, f"ended {restarts + 1} times (exit code {code}: {last}); no further restart")
                return
            restarts += 1
            if time.monotonic() - began > STABLE_S:
                delay = BACKOFF_S[0]
            # What worked once lacks something for a while, such as memory that others took when it died.
            why = last.removeprefix(f"{spec.member}: ")
            how = f"cannot start ({why})" if code == EXIT_BAD_START else f"ended with {_code_name(code)}"
            self._say(f"[{spec.member}] {how}; restart {restarts} in {delay:.1f} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, BACKOFF_S[1])

    async def _live(self, spec: RoleSpec, file: Path) -> tuple[int, str, bool]:
        """One life: (exit code, its last line, whether it was ever ready).

        Why it could not start is for ``failed`` to say, which is told once: that line is not said here.
        """
        lifeline, held = os.pipe()
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command(file),
                stdin=lifeline,
                stdout=PIPE,
                stderr=STDOUT,
                env={**os.environ, **_unset(spec.environment()), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops everybody in order
            )
            os.close(lifeline)
            self._children[spec.member] = child
            self._state.record(spec.member, child.pid)
            last, was_ready, why = "", False, ""
            assert child.stdout is not None
            async for raw in _lines(child.stdout):
                self._say_of(spec.member, why)
                last = raw.decode(errors="replace").rstrip() or last
                was_ready = was_ready or last.startswith(READY)
                why = last if last.startswith(f"{spec.member}: ") and not was_ready else ""
                self._say_of(spec.member, "" if why else last)
            code = await child.wait()
            self._say_of(spec.member, "" if code == EXIT_BAD_START or self._stopping.is_set() else why)
            return code, last, was_ready
        finally:
            os.close(held)

    def _say_of(self, member: MemberId, line: str) -> None:
        if line:
            self._say(f"[{member}] {line}")


async def _lines(output: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """One that is longer than a reader holds comes in parts: whoever writes it is kept, and read, all the same."""
    while True:
        try:
            line = await output.readuntil()
        except asyncio.IncompleteReadError as e:
            line = e.partial
        except asyncio.LimitOverrunError as e:
            line = await output.readexactly(e.consumed)
        if not line:
            return
        yield line


def _unset(wanted: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _signal(child: Process, number: int) -> None:
    if child.returncode is None:
        try:
            child.send_signal(number)
        except ProcessLookupError:
            pass


def _code_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
