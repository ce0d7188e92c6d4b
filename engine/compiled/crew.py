"""Native threads that do one piece of work together, and sleep between two of them.

The caller is thread 0. A helper waits in native code without the interpreter's lock: it spins for the length of a short
pause, then sleeps on a futex, so that between two steps no core is taken from anybody. Inside a step the threads meet at
barriers, microseconds apart, where they spin first too; one whose partner was taken off its core goes to sleep as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from moonpool.engine.compiled.lanes import FLAGS, address, atomic_add, atomic_load, atomic_set, pause

# One cache line each in ``sync`` (int64).
GENERATION, ARRIVED, PHASE, SLEEPERS, STOPPED = 0, 8, 16, 24, 32
SYNC_WORDS = 40

_SPINS = 3_000  # about 40 us of pauses: longer than nearly every wait inside a step
_SYS_FUTEX, _WAIT, _WAKE, _PRIVATE = 202, 0, 1, 128  # x86-64
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


@njit(**FLAGS)
def _wait_while(where, sleepers, value):
    """Until the word at ``where`` is no longer ``value``."""
    for _ in range(_SPINS):
        if atomic_load(where) != value:
            return
        pause()
    atomic_add(sleepers, 1)
    while atomic_load(where) == value:  # a futex compares the low half, which is enough: the word only counts up
        _syscall(_SYS_FUTEX, where, _WAIT | _PRIVATE, value & 0x7FFFFFFF, 0, 0, 0)
    atomic_add(sleepers, -1)


@njit(**FLAGS)
def _advance(where, sleepers, value):
    atomic_set(where, value & 0x7FFFFFFF)
    if atomic_load(sleepers) > 0:
        _syscall(_SYS_FUTEX, where, _WAKE | _PRIVATE, 0x7FFFFFFF, 0, 0, 0)


@njit(**FLAGS)
def barrier(sync, threads):
    """Nobody passes before all ``threads`` have come; what each wrote before is seen by all after."""
    if threads == 1:
        return
    base = address(sync)
    phase = atomic_load(base + 8 * PHASE)
    if atomic_add(base + 8 * ARRIVED, 1) == threads - 1:
        atomic_set(base + 8 * ARRIVED, 0)
        _advance(base + 8 * PHASE, base + 8 * SLEEPERS, phase + 1)
    else:
        _wait_while(base + 8 * PHASE, base + 8 * SLEEPERS, phase)


@njit(**FLAGS)
def begin(sync):
    """Set the helpers to work."""
    base = address(sync)
    _advance(base + 8 * GENERATION, base + 8 * SLEEPERS, atomic_load(base + 8 * GENERATION) + 1)


@njit(**FLAGS)
def await_work(sync, seen):
    """A helper's wait for more than generation ``seen``; returns the new one, or -1 when the crew is dismissed."""
    base = address(sync)
    _wait_while(base + 8 * GENERATION, base + 8 * SLEEPERS, seen)
    return -1 if atomic_load(base + 8 * STOPPED) else atomic_load(base + 8 * GENERATION)


@njit(**FLAGS)
def dismiss(sync):
    atomic_set(address(sync) + 8 * STOPPED, 1)
    begin(sync)


def fresh_sync() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.zeros(SYNC_WORDS, np.int64)
