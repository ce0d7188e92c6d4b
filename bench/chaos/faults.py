"""Faults as they are made: real signals, real cuts, real bytes. One object per strike.

``strike`` injects it and says what was hit; ``heal`` ends what does not end by itself, and may be called in any state of the
cluster. Both are called by one thread; what goes on in between has a thread of the fault's own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moonpool.bench.chaos.house import House
from moonpool.bench.chaos.kinds import REGISTRY
from moonpool.bench.chaos.members import NAMES, SIDES, of_role
from moonpool.bench.chaos.network import Network
from moonpool.bench.chaos.registries import alive
from moonpool.bench.chaos.schedule import Planned
from moonpool.core.errors import Bug
from moonpool.core.ids import Role
from moonpool.kvstore.regions import DEFAULT_DIRECTORY

SLICE_S = 0.05
FLIPS_PER_S = 200
SSD_FLIPS = 400
STEPS_S = (5.0, 7_200.0)  # of clocks


class Fault:
    """``targets`` are members, or the registry, whose return is waited for."""

    def __init__(self, planned: Planned, house: House) -> None:
        self.planned, self.house = planned, house
        self.targets: tuple[str, ...] = ()
        self.killed = 0  # the process that it took away

    def strike(self, rng: np.random.Generator) -> str:
        raise NotImplementedError

    def over(self) -> bool:
        """It ended by itself."""
        return False

    def heal(self) -> None:
        """A no-op where nothing is left to end."""

    def _anyone(self, rng: np.random.Generator) -> str:
        """The member of the planned role on the planned side, or any member of that side."""
        role, side = self.planned.kind.role, self.planned.side
        if role == REGISTRY:
            return REGISTRY
        return of_role(side, role) if role else NAMES[side][int(rng.integers(len(NAMES[side])))]

    def _pid(self, member: str) -> int:
        return self.house.registry.pid if member == REGISTRY else self.house.pid(member)


class Kill(Fault):
    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets, self.killed = (member,), self._pid(member)
        return f"{member} {_signalled(self.killed, signal.SIGKILL)}"

    def heal(self) -> None:
        if self.targets == (REGISTRY,):
            self.house.registry.start()


class Stop(Fault):
    """A process that does not run; ``Hang`` ends early where the host's agent has killed it."""

    pid = 0

    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets, self.pid = (member,), self._pid(member)
        return f"{member} {_signalled(self.pid, signal.SIGSTOP)}"

    def heal(self) -> None:
        _signalled(self.pid, signal.SIGCONT)


class Hang(Stop):
    def over(self) -> bool:
        return self.house.pid(self.targets[0]) != self.pid


class Slices(Stop):
    """A slow machine: the process runs half of the time, in slices."""

    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets, self.pid = (member,), self._pid(member)
        self._worker = _Worker(self._turn, SLICE_S)
        self._stopped = False
        return f"{member} process {self.pid}"

    def _turn(self) -> None:
        self._stopped = not self._stopped
        _signalled(self.pid, signal.SIGSTOP if self._stopped else signal.SIGCONT)

    def heal(self) -> None:
        self._worker.end()
        super().heal()


class Cut(Fault):
    """Between the planned role on the planned side and its peer on either; or between any process there and the registry."""

    def strike(self, rng: np.random.Generator) -> str:
        kind, side = self.planned.kind, self.planned.side
        one = self._anyone(rng)
        if kind.peer == REGISTRY:
            other = REGISTRY
        else:
            far = next(s for s in SIDES if s != side)
            here = kind.peer == Role.STORE and kind.role == Role.STORE
            other = of_role(far if here or rng.random() < 0.5 else side, kind.peer)
        self.targets = tuple(name for name in (one, other) if name != REGISTRY)
        self._ends = (one, other)
        self._network().cut(one, other)
        return f"{one} from {other}"

    def heal(self) -> None:
        self._network().mend(*self._ends)

    def _network(self) -> Network:
        if self.house.network is None:
            raise Bug("a cut without a network")
        return self.house.network


class Isolate(Cut):
    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets = (member,)
        self._network().pull(member)
        return member

    def heal(self) -> None:
        self._network().plug(self.targets[0])


class FlipSlots(Fault):
    """Of the region files that the node maps: sealed slots, slots that land just now, free ones; whatever is there."""

    def strike(self, rng: np.random.Generator) -> str:
        self._rng = rng
        member = self._anyone(rng)
        self.targets = (member,)
        pattern = f"moonpool+{self.house.name}+{self.planned.side}+{self.house.pid(member)}+*"
        folder = Path(self.house.config.store.directory or DEFAULT_DIRECTORY)
        self._regions = [np.memmap(path, np.uint8, "r+") for path in sorted(folder.glob(pattern))]
        self.flipped = 0
        self._worker = _Worker(self._flip, 1 / FLIPS_PER_S)
        return f"{member}: {FLIPS_PER_S} bits a second in {len(self._regions)} region files"

    def _flip(self) -> None:
        if self._regions:
            region = self._regions[int(self._rng.integers(len(self._regions)))]
            at = int(self._rng.integers(len(region)))
            region[at] ^= np.uint8(1 << int(self._rng.integers(8)))
            self.flipped += 1

    def heal(self) -> None:
        self._worker.end()
        self._regions.clear()


class FlipSsd(Fault):
    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets = (member,)
        files = _segments(self.house, self.planned.side)
        for _ in range(SSD_FLIPS if files else 0):
            _flip_in(files[int(rng.integers(len(files)))], rng)
        return f"{member}: {SSD_FLIPS if files else 0} bits in {len(files)} SSD files"


class FullDisk(Fault):
    """A segment file goes, and somebody else takes its space and all the rest, again and again."""

    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets = (member,)
        files = _segments(self.house, self.planned.side)
        gone = [files[int(rng.integers(len(files)))]] if files else []
        for path in gone:
            path.unlink(missing_ok=True)
        self._ballast = Path(self.house.config.store.ssd_path) / "ballast"
        self._worker = _Worker(self._fill, 0.05)
        return f"{member}: {[path.name for path in gone]} removed, then full"

    def _fill(self) -> None:
        try:
            with self._ballast.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            return

    def heal(self) -> None:
        self._worker.end()
        self._ballast.unlink(missing_ok=True)


class Clock(Fault):
    """Two steps: there, and back at the end."""

    def strike(self, rng: np.random.Generator) -> str:
        member = self._anyone(rng)
        self.targets = (member,)
        seconds = float(rng.uniform(*STEPS_S)) * (-1 if self.planned.kind.name == "clock-back" else 1)
        self._set(seconds)
        return f"{member} by {seconds:+.0f} s"

    def heal(self) -> None:
        self._set(0.0)

    def _set(self, seconds: float) -> None:
        if self.house.clocks is None:
            raise Bug("a clock's step without clocks")
        self.house.clocks.set(self.targets[0], seconds)


FAULTS: dict[str, type[Fault]] = {
    "kill": Kill,
    "stop": Stop,
    "hang": Hang,
    "slices": Slices,
    "cut": Cut,
    "isolate": Isolate,
    "flip_slots": FlipSlots,
    "flip_ssd": FlipSsd,
    "full_disk": FullDisk,
    "clock": Clock,
}


class _Worker:
    """Calls ``turn`` every ``period_s`` from a thread of its own until ``end``."""

    def __init__(self, turn: Callable[[], None], period_s: float) -> None:
        self._turn, self._period_s = turn, period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="chaos-fault")
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self._turn()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def _signalled(pid: int, number: int) -> str:
    if not pid or not alive(pid):
        return "was not there"
    os.kill(pid, number)
    return f"process {pid} at {time.time():.3f}"


def _segments(house: House, side: str) -> list[Path]:
    path = house.config.store.ssd_path
    return sorted((Path(path) / side).glob("segment-*")) if path else []


def _flip_in(path: Path, rng: np.random.Generator) -> None:
    try:
        with path.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            at = int(rng.integers(max(size, 1)))
            byte = os.pread(file.fileno(), 1, at)
            if byte:
                os.pwrite(file.fileno(), bytes([byte[0] ^ (1 << int(rng.integers(8)))]), at)
    except FileNotFoundError:
        return
