"""Who does what in a step: phases made of units, which any thread may take, and take over.

All threads go through the same phases in the same order; a phase begins once every unit of the one before is done. Each
thread takes units of its own part of a phase, one after another, then those that others have left. Where all are taken and
one stays undone for a while, its thread has lost its core to other work of the machine: whoever waits does that unit once
more. So a thread that is away costs the step its share of the work and no more, where a barrier would have all others wait.

A unit may be done twice, at the same time or long after the phase is over, because

* it reads only what earlier phases wrote, and writes every bit as anybody else would: never ``x += y`` on shared numbers;
* buffers are those of one layer, in a ring of sets (``records.WORK``): what it reads is there, and what it writes harms
  nobody, as long as no thread begins a layer that would use them again (``crew.enter``).

A row of the board holds one phase: how many units are done, how many each part has given out, and a byte for each unit.
"""

from __future__ import annotations

from numba import njit

from moonpool.engine.compiled.lanes import FLAGS, INLINE, atomic_add, atomic_load, byte, pause, swap_byte

LINE = 64  # bytes
_PATIENCE = 3_000  # pauses, about 40 us: what a unit of a decode step takes, or more


def row_bytes(threads: int, units: int) -> int:
    """Of a board whose phases have ``units`` units at most."""
    return LINE * (1 + threads) + -(-units // LINE) * LINE


@njit(**INLINE)
def flag_of(row, threads, unit):
    """Where it stands whether a unit is done."""
    return row + LINE * (1 + threads) + unit


@njit(**FLAGS)
def take(row, units, parts, thread, threads):
    """A unit to do now; -1: all are done. ``parts``: ``threads``, or 1 where units are to be begun in their order."""
    for i in range(parts):
        part = (thread + i) % parts
        first, end = units * part // parts, units * (part + 1) // parts
        given = row + LINE * (1 + part)
        if atomic_load(given) < end - first:
            unit = first + atomic_add(given, 1)
            if unit < end:
                return unit
    for _ in range(_PATIENCE if threads > 1 else 1):
        if atomic_load(row) >= units:
            return -1
        pause()
    for i in range(units):
        unit = (i + thread) % units
        if not byte(flag_of(row, threads, unit)):
            return unit
    return -1


@njit(**FLAGS)
def finish(row, threads, unit):
    if not swap_byte(flag_of(row, threads, unit), 1):
        atomic_add(row, 1)


@njit(**INLINE)
def _first(things, grain, part, parts):
    """Of ``things``, in whole grains, the first of a part; its last one comes before the first of the next part's."""
    return things // grain * part // parts * grain


@njit(**INLINE)
def units_of(things, grain, size, parts):
    """Units of up to ``size`` things that a phase has: as many in each part, so that some may be empty."""
    return (((things // grain + parts - 1) // parts * grain + size - 1) // size) * parts


@njit(**INLINE)
def unit_of(things, grain, size, parts, units, unit):
    """The things [first, last) of a unit."""
    part, turn = unit // (units // parts), unit % (units // parts)
    first = _first(things, grain, part, parts) + turn * size
    return first, min(first + size, _first(things, grain, part + 1, parts))
