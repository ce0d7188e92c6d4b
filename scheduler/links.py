"""How long KV takes from node to node: measured rates, and what the transfers in flight leave of them.

A node has one way out and one way in, and a pair of nodes may be slower than both (another switch, another NIC). Rates
are learned from what workers measured, each divided by how many flows shared its narrowest link meanwhile; traffic that
nobody booked slows the measurements and so the rates. A new flow and those in flight share a link equally, so it is
through when each of them has got as much as the new one wants, or what it had left: sum of min(left, size) over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.core.ids import NodeId
from moonpool.core.membership import LinkTiming
from moonpool.scheduler.estimates import Fit, OnlineFit
from moonpool.scheduler.flows import Costs, Flow, Flows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PER_NODE, PER_PAIR, PER_CLUSTER = 16, 8, 64  # newest measurements kept
PAIR_MIN = 3  # measurements before a pair counts by itself
FAST = 0.25  # quantile of a node's seconds per byte: what it can do with its better partners
APART = 4.0  # the largest transfer over the smallest, from which on latency and rate can be told apart
FASTEST = 1e-14  # seconds per byte; what remains of a measurement that latency explains
GROWTH = 64  # nodes

Measured = dict[int, deque[float]]


class Links:
    """``bytes_per_s`` and ``latency_s``: of any link, until it is measured; 0 bytes per second: unknown, taken as free."""

    def __init__(self, *, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        self._seed = 1.0 / bytes_per_s if bytes_per_s > 0.0 else 0.0
        self._seed_latency_s = latency_s
        self._numbers: dict[NodeId, int] = {}
        self._free = list(reversed(range(GROWTH)))  # numbers nobody has
        self._costs = Costs(np.full(GROWTH, self._seed), np.full(GROWTH, self._seed), np.zeros((GROWTH, GROWTH)))
        self._out: Measured = {}
        self._into: Measured = {}
        self._pair: dict[tuple[int, int], deque[float]] = {}
        self._all: deque[float] = deque(maxlen=PER_CLUSTER)
        self._online = OnlineFit((latency_s, self._seed))
        self._sizes = (float("inf"), 0.0)  # the smallest and the largest transfer measured
        self._flows = Flows()
        self._rows: tuple[tuple[NodeId, ...], Ints] = ((), np.zeros(0, np.int64))

    @property
    def fit(self) -> Fit:
        """Seconds = latency + bytes x cost over all links: ``sure`` and the error bounds are those of any one."""
        return self._online.fit

    @property
    def latency_s(self) -> float:
        fit = self._online.fit
        apart = self._sizes[1] >= APART * self._sizes[0]
        return fit.coefficients[0] if fit.sure and apart else self._seed_latency_s

    def __len__(self) -> int:
        """Flows booked."""
        return len(self._flows)

    # -- what is known -------------------------------------------------------------------------------------------------

    def begin(self, name: str, source: NodeId, target: NodeId, size: float, at: float) -> None:
        """Book ``size`` bytes under ``name``, moving from ``at`` on. A flow inside one node is none."""
        if source != target and size > 0:
            self._flows.begin(name, Flow(self._number(source), self._number(target), float(size), at, done_at=at))

    def end(self, name: str) -> None:
        """It is over, or never came; unknown names change nothing."""
        self._flows.end(name)

    def advance(self, now: float) -> None:
        """Flows move on until ``now``; to be called before ``seconds`` is asked."""
        self._flows.advance(now, self._costs)

    def forget(self, node: NodeId) -> None:
        """``node`` is gone: its flows are over, and the next node of that name may be another machine."""
        number = self._numbers.pop(node, None)
        if number is None:
            return
        self._free.append(number)
        self._rows = (), np.zeros(0, np.int64)
        self._flows.forget(number)
        self._out.pop(number, None)
        self._into.pop(number, None)
        self._pair = {ends: seen for ends, seen in self._pair.items() if number not in ends}
        self._costs.pair[number] = self._costs.pair[:, number] = 0.0
        self._costs.out[number] = self._costs.into[number] = self._usual()

    def measured(self, timing: LinkTiming, now: float) -> None:
        """Ends the oldest flow of its pair. Impossible values are skipped: they come from another process."""
        if timing.source == timing.target or timing.bytes <= 0 or not 0.0 < timing.seconds < 1e5:
            return
        self.advance(now)
        source, target = ends = self._number(timing.source), self._number(timing.target)
        flow = self._flows.take(source, target)
        sharing = flow.shared_s / flow.moved_s if flow is not None and flow.moved_s > 0.0 else 1.0
        self._online.add((1.0, timing.bytes * sharing), timing.seconds, timing.bytes)
        self._sizes = min(self._sizes[0], timing.bytes), max(self._sizes[1], timing.bytes)
        cost = max((timing.seconds - self.latency_s) / (timing.bytes * sharing), FASTEST)
        self._all.append(cost)
        out = _keep(self._out, source, cost)
        into = _keep(self._into, target, cost)
        pair = self._pair.setdefault(ends, deque(maxlen=PER_PAIR))
        pair.append(cost)
        self._costs.out[source], self._costs.into[target] = np.quantile(out, FAST), np.quantile(into, FAST)
        if len(pair) >= PAIR_MIN:
            self._costs.pair[ends] = float(np.median(pair))
        self._fill_unknown()

    def _fill_unknown(self) -> None:
        """Nodes nobody measured yet are as fast as is usual here."""
        usual = self._usual()
        for costs, known in ((self._costs.out, self._out), (self._costs.into, self._into)):
            mask = np.ones(len(costs), bool)
            mask[list(known)] = False
            costs[mask] = usual

    def _usual(self) -> float:
        return float(np.median(self._all)) if self._all else self._seed

    def _number(self, node: NodeId) -> int:
        number = self._numbers.get(node)
        if number is None:
            if not self._free:
                self._grow()
            number = self._numbers[node] = self._free.pop()
        return number

    def _grow(self) -> None:
        costs, old = self._costs, len(self._costs.out)
        costs.out = np.pad(costs.out, (0, old), constant_values=self._usual())
        costs.into = np.pad(costs.into, (0, old), constant_values=self._usual())
        costs.pair = np.pad(costs.pair, (0, old))
        self._free = list(reversed(range(old, 2 * old)))

    # -- asking --------------------------------------------------------------------------------------------------------

    def seconds(self, source: NodeId, size: float | Floats, targets: Sequence[NodeId]) -> Floats:
        """[targets] seconds for ``size`` bytes (one number, or one per target) to come from ``source``, beginning now.

        0 inside one node, and while neither a seed nor a measurement says anything.
        """
        number, rows = self._number(source), self._numbers_of(targets)
        sizes = np.broadcast_to(np.asarray(size, np.float64), rows.shape)
        out, into, pair = sizes.copy(), sizes.copy(), sizes.copy()
        if flows := self._flows.active():
            table = np.array([(flow.left, flow.source, flow.target) for flow in flows])
            part = np.minimum(table[:, :1], sizes)  # [flows, targets] bytes that each moves meanwhile
            arriving = part * (table[:, 2:] == rows)
            leaving = table[:, 1] == number
            out += part[leaving].sum(axis=0)
            into += arriving.sum(axis=0)
            pair += arriving[leaving].sum(axis=0)
        seconds: Floats = np.maximum(out * self._costs.out[number], into * self._costs.into[rows])
        np.maximum(seconds, pair * self._costs.pair[number, rows], out=seconds)
        seconds += self.latency_s
        seconds[rows == number] = 0.0
        return seconds

    def _numbers_of(self, targets: Sequence[NodeId]) -> Ints:
        """A board's rows are asked about again and again: the last tuple is remembered."""
        if self._rows[0] is targets:
            return self._rows[1]
        numbers = np.array([self._number(node) for node in targets], np.int64)
        if isinstance(targets, tuple) and len(targets) > 1:
            self._rows = targets, numbers
        return numbers


def _keep(measured: Measured, node: int, cost: float) -> deque[float]:
    seen = measured.setdefault(node, deque(maxlen=PER_NODE))
    seen.append(cost)
    return seen
