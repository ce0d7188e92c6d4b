"""The host-wide compute permit: files that the workers of one host share (``core.permit`` says who goes when).

In the folder lie ``cores``, the permit; ``prompts``, which prefill workers take before they ask for the permit, so that at most
one of them stands in a decode worker's way; and a note of each decode worker. Turns are for the one compute thread of a worker;
its event loop only reads and writes notes, which blocks nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.gaps import Room
from moonpool.core.permit import (
    MOST_PATIENCE_S,
    NOTE_BYTES,
    TOLD,
    WAITS,
    Beside,
    Note,
    all_beside,
    patience_s,
    slice_over,
    somebody_waits,
)
from moonpool.engine.timed_lock import TimedLock

NOTE = ".note"
LOOK_S = 1.0  # between two looks for notes of new workers
NAP_S = 2e-4  # a thread that was let pass has the permit within about so long,
NAPS = 25  # or it is not coming
PROMPT_PATIENCE = 4.0  # times this worker's own last chunk: how long another one's is waited for


class StepTurns(Protocol):
    """A decode worker's turns."""

    def turn(self) -> AbstractContextManager[None]:
        """Around a step."""

    def tell(self, room: Room, step_s: float) -> None:
        """What the running answers leave to others, from now on; a step takes ``step_s``."""

    def rest(self) -> None:
        """No answers run."""

    def numbers(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class PromptTurns(Protocol):
    """A prefill worker's turns."""

    def turn(self, slice_s: float) -> AbstractContextManager[None]:
        """Around a chunk: while a step waits, no longer than about ``slice_s`` at a time."""

    def between_layers(self) -> None: ...

    def pause(self, *, long: bool = False) -> AbstractContextManager[None]:
        """Around waiting for something else, within a turn. ``long``: for another worker, so that other prompts of this host go
        meanwhile, too, and may have to be waited for."""

    def beside(self) -> Beside:
        """The answers that run on this host now."""

    @property
    def waited_s(self) -> float:
        """In all turns so far."""

    def numbers(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Unshared:
    """For a worker that nobody shares its cores with, and for cores that are dealt out by count."""

    waited_s = 0.0

    def turn(self, slice_s: float = 0.0) -> AbstractContextManager[None]:
        return nullcontext()

    def between_layers(self) -> None:
        pass

    def pause(self, *, long: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def beside(self) -> Beside:
        return Beside()

    def tell(self, room: Room, step_s: float) -> None:
        pass

    def rest(self) -> None:
        pass

    def numbers(self) -> dict[str, float]:
        return dict.fromkeys(("permit_waits_count", "permit_wait_seconds", "permit_forced_count"), 0.0)

    def close(self) -> None:
        pass


class UnsharedPrompts(Unshared):
    def numbers(self) -> dict[str, float]:
        return {**super().numbers(), "permit_passes_count": 0.0}


def permit_folder(state_dir: Path) -> Path:
    """Of this host, also where hosts share ``state_dir``."""
    return state_dir / f"permit-{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii')[:8]}"


def step_turns(config: Config, name: str) -> StepTurns:
    """Of the decode worker ``name``. Whoever knows all workers of the host has decided about ``engine.permit`` before."""
    if config.engine.permit != "on":
        return Unshared()
    return SharedSteps(permit_folder(config.state_dir(Path.home())), name)


def prompt_turns(config: Config) -> PromptTurns:
    """Of a prefill worker; as ``step_turns``."""
    return SharedPrompts(permit_folder(config.state_dir(Path.home()))) if config.engine.permit == "on" else UnsharedPrompts()


class _Shared:
    """What both kinds of workers have."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._cores = TimedLock(folder / "cores")
        except OSError as e:
            raise ConfigError(
                f"engine.permit: cannot lock in {folder} ({e.strerror}); give cluster.state_dir a local folder, or set "
                'engine.permit = "off"',
                param="engine.permit",
            ) from e
        self._has_cores = False
        self._waits = self._forced = 0
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def numbers(self) -> dict[str, float]:
        return {
            "permit_waits_count": self._waits,  # turns that somebody else held up
            "permit_wait_seconds": self._waited_s,
            "permit_forced_count": self._forced,  # turns without the permit: its holder did not move
        }

    def close(self) -> None:
        self._cores.close()

    def _acquire(self, limit_s: float) -> None:
        """With the permit, or without it after ``limit_s``."""
        self._has_cores = self._cores.acquire(limit_s)
        self._forced += not self._has_cores

    def _let_go(self) -> None:
        if self._has_cores:
            self._has_cores = False
            self._cores.release()

    def _waited(self, begun: float) -> None:
        self._waits += 1
        self._waited_s += time.monotonic() - begun


class SharedSteps(_Shared):
    def __init__(self, folder: Path, name: str) -> None:
        """``name``: of the worker, the only one of its name on this host. ConfigError where the folder does not do."""
        super().__init__(folder)
        self._note = _map(folder / f"{name}{NOTE}")
        self._note[:] = Note().to_bytes()
        self._patience_s = MOST_PATIENCE_S

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._cores.acquire(0.0):
            self._has_cores = True
        else:
            begun = time.monotonic()
            WAITS.pack_into(self._note, 0, begun)
            self._acquire(self._patience_s)
            WAITS.pack_into(self._note, 0, 0.0)
            self._waited(begun)
        try:
            yield
        finally:
            self._let_go()

    def tell(self, room: Room, step_s: float) -> None:
        steady, most = (max(seconds - step_s, 0.0) for seconds in (room.steady_s, room.most_s))
        self._patience_s = patience_s(steady + step_s)
        TOLD.pack_into(self._note, WAITS.size, time.monotonic(), steady, most, step_s)

    def rest(self) -> None:
        TOLD.pack_into(self._note, WAITS.size, 0.0, 0.0, 0.0, 0.0)

    def close(self) -> None:
        super().close()
        self._note[:] = Note().to_bytes()
        self._note.close()


class SharedPrompts(_Shared):
    def __init__(self, folder: Path) -> None:
        """ConfigError where the folder does not do."""
        super().__init__(folder)
        self._folder = folder
        self._prompts = TimedLock(folder / "prompts")
        self._has_prompts = False
        self._notes: dict[str, mmap.mmap] = {}
        self._look_at = 0.0
        self._since = 0.0  # has the permit
        self._layer_at = 0.0  # the layer under way began
        self._slice_s = 0.0
        self._chunk_s = MOST_PATIENCE_S
        self._passes = 0

    @contextmanager
    def turn(self, slice_s: float) -> Iterator[None]:
        begun = time.monotonic()
        self._slice_s = slice_s
        self._has_prompts = self._prompts.acquire(PROMPT_PATIENCE * self._chunk_s)
        self._look(begun)
        self._take(begun)
        got = time.monotonic()
        try:
            yield
        finally:
            self._let_go()
            self._let_prompts()
            self._chunk_s = max(time.monotonic() - got, MOST_PATIENCE_S)

    def numbers(self) -> dict[str, float]:
        return {**super().numbers(), "permit_passes_count": self._passes}  # times that steps were let go first

    def between_layers(self) -> None:
        now = time.monotonic()
        layer_s, self._layer_at = now - self._layer_at, now
        if self._has_cores and slice_over(now - self._since, layer_s, self._slice_s) and self._waited_for(now):
            self._passes += 1
            self._let_go()
            self._let_pass()
            self._take(now)

    @contextmanager
    def pause(self, *, long: bool = False) -> Iterator[None]:
        self._let_go()
        if long:
            self._let_prompts()
        try:
            yield
        finally:
            begun = time.monotonic()
            if long and not self._prompts_free():
                self._has_prompts = self._prompts.acquire(PROMPT_PATIENCE * self._chunk_s)
                self._waited(begun)
            self._take(time.monotonic())

    def beside(self) -> Beside:
        now = time.monotonic()
        self._look(now)
        return all_beside(map(_read, list(self._notes.values())), now)

    def close(self) -> None:
        super().close()
        self._prompts.close()
        for note in self._notes.values():
            note.close()

    def _prompts_free(self) -> bool:
        self._has_prompts = self._prompts.acquire(0.0)
        return self._has_prompts

    def _let_prompts(self) -> None:
        if self._has_prompts:
            self._has_prompts = False
            self._prompts.release()

    def _take(self, begun: float) -> None:
        """Behind every step that waits, and after ``MOST_PATIENCE_S`` in any case."""
        until = begun + MOST_PATIENCE_S
        held_up = not self._cores.acquire(0.0)
        if held_up:
            self._acquire(max(until - time.monotonic(), 0.0))
        else:
            self._has_cores = True
        while self._has_cores and time.monotonic() < until and self._waited_for(time.monotonic()):
            held_up = True
            self._let_go()
            self._let_pass()
            self._acquire(max(until - time.monotonic(), 0.0))
        self._since = self._layer_at = time.monotonic()
        if held_up:
            self._waited(begun)

    def _let_pass(self) -> None:
        """The kernel wakes who stands in line, but would let this thread go first if it came back at once."""
        for _ in range(NAPS):
            time.sleep(NAP_S)
            if not self._waited_for(time.monotonic()):
                return

    def _waited_for(self, now: float) -> bool:
        return somebody_waits(map(_read, list(self._notes.values())), now)

    def _look(self, now: float) -> None:
        """For notes of workers that came since the last look."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        try:
            names = os.listdir(self._folder)
        except OSError:  # somebody cleared it away: those who have its files open go on
            return
        for name in names:
            if name.endswith(NOTE) and name not in self._notes:
                with suppress(OSError):  # another user's
                    self._notes[name] = _map(self._folder / name)


def _read(note: mmap.mmap) -> Note:
    return Note.from_bytes(note[:])


def _map(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, NOTE_BYTES)  # zeros where it is new: an empty note
        return mmap.mmap(file, NOTE_BYTES)
    finally:
        os.close(file)
