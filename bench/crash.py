"""Kill -9 at random instants of an operation, again and again: is any byte wrong afterwards, is all space there again?

The process that measures imports everything once, then forks a child per kill; so a kill costs tens of milliseconds.
The child repeats one operation for ever and notes on a page shared with its parent when each begins and ends. The
parent kills it at an instant drawn uniformly over the measured span of the operation, then looks at what is left. Run
it from a process without threads (``moonpool bench crash``): a fork copies only the thread that calls it.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import statistics
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

WARM = 3  # rounds of every child before it may be killed; they also measure the span
NOTES = 32
_WORD = struct.Struct("<Q")


class Stage:
    """A page shared by parent and children: rounds begun and ended, spans, and what an operation notes for its check."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._begun_pipe = os.pipe()

    def _get(self, at: int) -> int:
        return int(_WORD.unpack_from(self._page, at * 8)[0])

    def _set(self, at: int, value: int) -> None:
        _WORD.pack_into(self._page, at * 8, value)

    def note(self, at: int, value: int) -> None:
        """Survives the child. ``at`` from 0 to NOTES - 1."""
        self._set(64 + at, value)

    def noted(self, at: int) -> int:
        return self._get(64 + at)

    def begin(self) -> None:
        """The operation starts now."""
        self._set(2, time.monotonic_ns())
        self._set(0, self._get(0) + 1)
        os.write(self._begun_pipe[1], b"b")

    def end(self) -> None:
        self._set(3, time.monotonic_ns() - self._get(2))
        self._set(1, self._get(1) + 1)

    def await_begin(self) -> bool:
        """The parent's: until the next operation begins. False: the child is gone."""
        return os.read(self._begun_pipe[0], 1) == b"b"

    def reset(self) -> None:
        """Before a fork. Notes stay."""
        self.close()
        self._begun_pipe = os.pipe()
        for at in range(4):
            self._set(at, 0)

    def parent_side(self) -> None:
        """The writing end lives on in the child alone: its death ends the pipe."""
        os.close(self._begun_pipe[1])
        self._begun_pipe = (self._begun_pipe[0], -1)

    def close(self) -> None:
        for fd in self._begun_pipe:
            if fd >= 0:
                os.close(fd)
        self._begun_pipe = (-1, -1)

    @property
    def in_the_middle(self) -> bool:
        return self._get(0) > self._get(1)

    @property
    def last_span_s(self) -> float:
        return self._get(3) / 1e9


@dataclass(frozen=True)
class Checked:
    """What one look after a kill found. ``faults`` are sentences; none means that all is well."""

    found: int  # blocks found and right
    faults: tuple[str, ...] = ()
    torn: int = 0  # blocks found to be cut by the kill, and dropped


class Operation(Protocol):
    """One that is a context manager, too, is entered before its first child is forked, and left after its last check."""

    name: str

    def run(self, folder: Path, stage: Stage) -> None:
        """In the child: prepare, then for ever ``stage.begin()``, the operation, ``stage.end()``."""

    def check(self, folder: Path, stage: Stage) -> Checked:
        """In the parent, after the child's death. Leaves the folder fit for the next child."""


@dataclass
class Struck:
    kills: int = 0
    in_the_middle: int = 0
    found: int = 0
    torn: int = 0
    spans: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "kills": self.kills,
            "in_the_middle": self.in_the_middle,
            "span_ms": 1e3 * statistics.median(self.spans) if self.spans else None,
            "blocks_checked": self.found,
            "blocks_torn": self.torn,
            "faults": self.faults,
        }


def crash(
    operations: Sequence[Operation], *, kills: int = 40, path: Path | None = None, seed: int = 0, say: Callable[[str], None]
) -> dict[str, Any]:
    """``kills`` per operation, in a folder of its own under ``path``; figures by operation, and their sums."""
    out: dict[str, Any] = {}
    rng = random.Random(seed)
    for operation in operations:
        around = operation if isinstance(operation, AbstractContextManager) else nullcontext()
        with tempfile.TemporaryDirectory(dir=path, prefix="moonpool-crash-") as folder, around:
            struck = strike(operation, Path(folder), kills, rng)
        out[operation.name] = struck.figures()
        say(f"{operation.name}: {struck.kills} kills, {struck.in_the_middle} in the middle, {len(struck.faults)} faults")
    names = [operation.name for operation in operations]
    return {
        "operations": out,
        "kills": sum(out[name]["kills"] for name in names),
        "in_the_middle": sum(out[name]["in_the_middle"] for name in names),
        "faults": sum(len(out[name]["faults"]) for name in names),
        "seed": seed,
    }


def strike(operation: Operation, folder: Path, kills: int, rng: random.Random) -> Struck:
    struck, stage = Struck(), Stage()
    try:
        for _ in range(kills):
            _one(operation, folder, stage, struck, rng)
    finally:
        stage.close()
    return struck


def _one(operation: Operation, folder: Path, stage: Stage, struck: Struck, rng: random.Random) -> None:
    stage.reset()
    pid = os.fork()
    if pid == 0:
        _child(operation, folder, stage)
    stage.parent_side()
    spans: list[float] = []
    alive = stage.await_begin()
    for _ in range(WARM + rng.randrange(3)):
        alive = alive and stage.await_begin()
        spans.append(stage.last_span_s)
    if alive:
        span = statistics.median(spans)
        time.sleep(rng.random() * span)
        struck.spans.append(span)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        struck.faults.append(f"the child ended by itself, status {status}")
        return
    struck.kills += 1
    struck.in_the_middle += stage.in_the_middle
    checked = operation.check(folder, stage)
    struck.found += checked.found
    struck.torn += checked.torn
    struck.faults += checked.faults


def _child(operation: Operation, folder: Path, stage: Stage) -> None:
    """Never returns into the parent's stack."""
    try:
        operation.run(folder, stage)
    except BaseException:  # noqa: BLE001 - a forked child must not unwind into its parent's frames
        traceback.print_exc()
    finally:
        os._exit(1)
