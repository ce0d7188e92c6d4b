"""What a decode worker will be busy with: expected sequences, context tokens and step time over the next seconds.

A running sequence grows by a token a step and is still there with the probability that its answer, already so long, gets
longer (``output_length``). A booked prefill lands when it is predicted to end and then does the same. The batch sets the
pace and the pace the batch: two rounds from a constant pace are within a few per cent of where more rounds lead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moonpool.core.ids import MemberId
from moonpool.scheduler.output_length import BIN_OF, EDGES, LONGEST, OutputLengths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLOT_S = 1.0
SLOTS = 40
AHEAD_S: Final[Floats] = np.arange(SLOTS, dtype=np.float64) * SLOT_S
ROUNDS = 2
MIN_STEP_S = 1e-5


@dataclass(frozen=True, slots=True)
class Expected:
    """A sequence of ``context`` tokens, ``produced`` of them output, that may produce ``most`` more, of class ``kind``
    (``OutputLengths.kind``). It is in the batch from ``at`` on; those running now were before."""

    context: int
    produced: int
    most: int
    kind: int
    at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Course:
    """[SLOTS] of one worker, ``SLOT_S`` apart, from ``begins`` on. ``deviation_s``: standard deviation of ``step_s``;
    ``steps``: made by then."""

    begins: float
    batch: Floats
    context: Floats
    step_s: Floats
    deviation_s: Floats
    steps: Floats


def course(sequences: Sequence[Expected], lengths: OutputLengths, fit: Sequence[float], now: float) -> Course:
    """``fit``: seconds of a step = a + b batch + c context. ``sequences`` are as of ``now``."""
    a, b, c = fit
    table = np.array([(s.context, s.produced, s.most, s.kind, s.at - now) for s in sequences], np.float64).reshape(-1, 5)
    context, produced, most, after = table[:, :1], table[:, 1:2], table[:, 2:3], np.maximum(table[:, 4], 0.0)
    curves = _Curves(lengths, table[:, 3].astype(np.int64))
    here = after <= 0.0
    steps = AHEAD_S / max(a + b * here.sum() + c * table[here, 0].sum(), MIN_STEP_S)  # made by each slot
    for _ in range(ROUNDS):
        grown = steps - np.interp(after, AHEAD_S, steps)[:, None]  # [sequences, SLOTS] tokens since it joined
        alive = curves.alive(produced, grown)
        alive[(grown < 0.0) | (grown >= most)] = 0.0
        size = context + grown
        batch, tokens = alive.sum(axis=0), (alive * size).sum(axis=0)
        step_s = np.maximum(a + b * batch + c * tokens, MIN_STEP_S)
        steps = np.concatenate([[0.0], np.cumsum(SLOT_S / step_s)[:-1]])
    variance = (alive * (1.0 - alive) * (b + c * size) ** 2).sum(axis=0)
    return Course(now, batch, tokens, step_s, np.sqrt(variance), steps)


def joined(made: Course, sequence: Expected, lengths: OutputLengths, fit: Sequence[float]) -> Course:
    """``made`` with one more sequence, which slows the others' steps but not, as in ``course``, their progress."""
    a, b, c = fit
    first = min(math.ceil((sequence.at - made.begins) / SLOT_S), SLOTS - 1) if sequence.at > made.begins else 0
    grown = made.steps[first:] - made.steps[first]
    alive = lengths.curve(sequence.kind).beyond(sequence.produced + grown, float(sequence.produced))
    alive[grown >= sequence.most] = 0.0
    size = sequence.context + grown
    batch, tokens, step_s, deviation = (values.copy() for values in (made.batch, made.context, made.step_s, made.deviation_s))
    batch[first:] += alive
    tokens[first:] += alive * size
    step_s[first:] = np.maximum(a + b * batch[first:] + c * tokens[first:], MIN_STEP_S)
    deviation[first:] = np.sqrt(deviation[first:] ** 2 + alive * (1.0 - alive) * (b + c * size) ** 2)
    return Course(made.begins, batch, tokens, step_s, deviation, made.steps)


class _Curves:
    """Survival curves of many sequences, one row each."""

    def __init__(self, lengths: OutputLengths, kinds: Ints) -> None:
        self._cumulative, self._rates = lengths.cumulative.ravel(), lengths.rates.ravel()
        self._offsets = (kinds * lengths.rates.shape[1])[:, None]

    def alive(self, produced: Floats, grown: Floats) -> Floats:
        """P(longer than produced + grown | longer than produced)."""
        return np.exp(self._ended(produced) - self._ended(produced + np.maximum(grown, 0.0)))

    def _ended(self, tokens: Floats) -> Floats:
        capped = np.minimum(tokens, LONGEST)
        bins = BIN_OF[capped.astype(np.int64)]
        at = self._offsets + bins
        return np.asarray(self._cumulative[at] + (capped - EDGES[bins]) * self._rates[at])


@dataclass(frozen=True, slots=True)
class Ahead:
    """Per worker asked about. ``step_s``: the longest expected step in the window, with the new sequence in the batch;
    ``deviation_s``: the largest standard deviation there; ``batch`` and ``context``: of the others, when it joins."""

    step_s: Floats
    deviation_s: Floats
    batch: Floats
    context: Floats


class DecodeForecast:
    """The courses of all decode workers as arrays: one question answers for every row of a board.

    The longest step of a window is found when a course is written, for the window asked about last: there is one in use.
    """

    def __init__(self) -> None:
        self._courses: dict[MemberId, tuple[Course, tuple[float, float, float]]] = {}
        self._window = 0  # slots
        self._arrange(())

    def write(self, worker: MemberId, expected: Course, fit: Sequence[float]) -> None:
        self._courses[worker] = expected, (fit[0], fit[1], fit[2])
        if worker in self._rows:
            self._fill(self._rows[worker], worker)

    def forget(self, worker: MemberId) -> None:
        if self._courses.pop(worker, None) is not None:
            self._arrange(())

    def ahead(self, workers: tuple[MemberId, ...], at: float, window_s: float, tokens: int) -> Ahead:
        """What a sequence of ``tokens`` meets that joins at ``at``, during ``window_s``. Workers never written are idle, and
        what lies beyond the courses is as at their end."""
        window = int(window_s / SLOT_S)
        if workers is not self._workers or window != self._window:
            self._window = window
            self._arrange(workers)
        slots = np.clip(((at - self._begins) / SLOT_S).astype(np.int64), 0, SLOTS - 1)
        longest, deviations, batches, contexts = self._table[:, self._offsets + slots]
        return Ahead(longest + self._fits[1] + self._fits[2] * tokens, deviations, batches, contexts)

    def _arrange(self, workers: tuple[MemberId, ...]) -> None:
        self._workers, self._rows = workers, {name: row for row, name in enumerate(workers)}
        self._table = np.zeros((4, len(workers) * SLOTS))  # of all rows, one after the other
        self._begins, self._fits = np.zeros(len(workers)), np.zeros((3, len(workers)))
        self._offsets = np.arange(len(workers)) * SLOTS
        for name, row in self._rows.items():
            if name in self._courses:
                self._fill(row, name)

    def _fill(self, row: int, worker: MemberId) -> None:
        known, self._fits[:, row] = self._courses[worker]
        self._begins[row] = known.begins
        values = (_highest(known.step_s, self._window), _highest(known.deviation_s, self._window), known.batch, known.context)
        self._table[:, row * SLOTS : (row + 1) * SLOTS] = values


def _highest(values: Floats, window: int) -> Floats:
    """[SLOTS] the largest of each value and the ``window`` after it, as far as there are any."""
    out, reached = values.copy(), 0
    while reached < window:
        step = min(reached + 1, window - reached, SLOTS)
        np.maximum(out[:-step], out[step:].copy(), out=out[:-step])
        reached += step
    return out
