"""Who of the workers that share a host's cores may use them all now. Pure: ``now`` is an argument, of one clock for the host.

One worker holds the permit at a time: a decode worker for a step, a prefill worker for a *slice*, as long as running answers
can wait. Steps go before slices: a prefill worker whose slice is over lets go between two layers as soon as a step waits, and
comes back after it. What workers tell one another stands in a ``Note`` each; a note of a worker that died or froze grows old
and is not believed.

Nobody waits for ever. The permit of a dead holder is free at once; a frozen one is waited for as long as ``patience_s`` says,
once, and not again until it moves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from moonpool.core.gaps import Room, tightest

FRESH_S = 1.0  # a note says something for so long
PATIENCE = 2.0  # times what a holder should take
LEAST_PATIENCE_S, MOST_PATIENCE_S = 0.05, 1.0
NOTE_BYTES = 40
WAITS = struct.Struct("<d")  # the first 8 bytes of a note are its compute thread's,
TOLD = struct.Struct("<4d")  # the others its event loop's


@dataclass(frozen=True, slots=True)
class Beside:
    """Running answers, as prompts see them: they leave ``room`` between two of their steps, which take ``step_s``."""

    room: Room = field(default_factory=Room)
    step_s: float = 0.0

    def takes_s(self, alone_s: float) -> float:
        """How long a prompt takes that would take ``alone_s`` without them, at their steady pace."""
        slice_s = self.room.steady_s
        if slice_s == inf:
            return alone_s
        return alone_s * (1.0 + self.step_s / slice_s) if slice_s > 0.0 else inf


@dataclass(frozen=True, slots=True)
class Note:
    """Of a decode worker. ``waits_since`` 0: it does not wait; ``told_at`` 0: no answers run."""

    waits_since: float = 0.0
    told_at: float = 0.0
    beside: Beside = field(default_factory=Beside)

    def to_bytes(self) -> bytes:
        room = self.beside.room
        return WAITS.pack(self.waits_since) + TOLD.pack(self.told_at, room.steady_s, room.most_s, self.beside.step_s)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Note:
        """Anything that is not a note is an empty one."""
        if len(raw) != NOTE_BYTES:
            return cls()
        (waits_since,), (told_at, steady_s, most_s, step_s) = WAITS.unpack_from(raw), TOLD.unpack_from(raw, WAITS.size)
        if not (0.0 <= steady_s <= most_s and step_s >= 0.0):  # NaN, or half of a note
            return cls(waits_since)
        return cls(waits_since, told_at, Beside(Room(steady_s, most_s), step_s))


def all_beside(notes: Iterable[Note], now: float) -> Beside:
    """The answers of all decode workers: the cores are theirs by turns."""
    told = [note.beside for note in notes if _fresh(note.told_at, now)]
    return Beside(tightest(one.room for one in told), sum(one.step_s for one in told))


def somebody_waits(notes: Iterable[Note], now: float) -> bool:
    return any(_fresh(note.waits_since, now) for note in notes)


def _fresh(at: float, now: float) -> bool:
    """One from the future was not written by this host's clock, or not whole."""
    return at != 0.0 and abs(now - at) <= FRESH_S


def slice_over(held_s: float, layer_s: float, slice_s: float) -> bool:
    """Whether a prefill worker gives way to a step that waits before its next layer, which takes ``layer_s``."""
    return held_s + layer_s > slice_s


def patience_s(expected_s: float) -> float:
    """How long the permit is waited for where its holder should be through in ``expected_s``."""
    if expected_s == inf:
        return MOST_PATIENCE_S
    return min(max(PATIENCE * expected_s, LEAST_PATIENCE_S), MOST_PATIENCE_S)
