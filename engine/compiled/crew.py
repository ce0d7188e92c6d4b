"""Native threads that do one piece of work together, and sleep between two of them.

The caller is thread 0. A helper waits in native code without the interpreter's lock: it spins for the length of a short
pause, then sleeps on a futex, so that between two steps no core is taken from anybody. A piece of work ends when every
thread has left it; inside it nobody waits for a thread that lost its core (``phases``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numba.core import types

from moonpool.engine.compiled.lanes import FLAGS, address, atomic_add, atomic_load, atomic_set, pause

# One cache line each in ``sync`` (int64), then one for each thread.
GENERATION, LEFT, SLEEPERS, STOPPED, BUSY = 0, 8, 16, 24, 32
ELSEWHERE = 1 << 40  # in ``BUSY``: in no layer

_SPINS = 3_000  # about 40 us of pauses
_SYS_FUTEX, _SYS_YIELD, _WAIT, _WAKE, _PRIVATE = 202, 24, 0, 1, 128  # x86-64
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
def _wake(where, sleepers):
    if atomic_load(sleepers) > 0:
        _syscall(_SYS_FUTEX, where, _WAKE | _PRIVATE, 0x7FFFFFFF, 0, 0, 0)


@njit(**FLAGS)
def begin(sync):
    """Set the helpers to work; all of them have left what they did before."""
    base = address(sync)
    atomic_set(base + 8 * LEFT, 0)
    atomic_set(base + 8 * GENERATION, (atomic_load(base + 8 * GENERATION) + 1) & 0x7FFFFFFF)
    _wake(base + 8 * GENERATION, base + 8 * SLEEPERS)


@njit(**FLAGS)
def await_work(sync, seen):
    """A helper's wait for more than generation ``seen``; returns the new one, or -1 when the crew is dismissed."""
    base = address(sync)
    _wait_while(base + 8 * GENERATION, base + 8 * SLEEPERS, seen)
    return -1 if atomic_load(base + 8 * STOPPED) else atomic_load(base + 8 * GENERATION)


@njit(**FLAGS)
def leave(sync, thread, threads):
    """This thread has nothing more to do with the work; thread 0 waits for the others."""
    base = address(sync)
    left, sleepers = base + 8 * LEFT, base + 8 * SLEEPERS
    atomic_set(base + 8 * (BUSY + 8 * thread), ELSEWHERE)
    if thread:
        atomic_add(left, 1)
        _wake(left, sleepers)
        return
    while True:
        gone = atomic_load(left)
        if gone >= threads - 1:
            return
        _wait_while(left, sleepers, gone)


@njit(**FLAGS)
def enter(sync, thread, threads, layer, sets):
    """Go on to ``layer``, once nobody is at work where its buffers are: ``sets`` - 2 layers behind, or further."""
    base = address(sync)
    atomic_set(base + 8 * (BUSY + 8 * thread), layer)
    for other in range(threads):
        where, spins = base + 8 * (BUSY + 8 * other), 0
        while atomic_load(where) < layer + 2 - sets:
            pause()
            spins += 1
            if spins > _SPINS:  # let it have this core
                _syscall(_SYS_YIELD, 0, 0, 0, 0, 0, 0)


@njit(**FLAGS)
def dismiss(sync):
    atomic_set(address(sync) + 8 * STOPPED, 1)
    begin(sync)


def fresh_sync(threads: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    sync = np.zeros(BUSY + 8 * threads, np.int64)
    sync[BUSY:] = ELSEWHERE
    return sync
