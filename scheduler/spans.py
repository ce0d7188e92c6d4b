"""How one long prompt is cut for a group of prefill workers, and when each of them will be through.

Each worker computes one span of the prompt, in one pass of all layers, and layer l of it as soon as the K/V of layer l of
everything before its span has come from the worker before it. So all compute at the same time, each one layer behind its
predecessor: the chunked pipeline of Mooncake (FAST 2025, section 5), with the prompt cut instead of the model. With k equal
workers that begin together the prompt takes (time of the longest span) x (1 + (k - 1) / layers). Attention of later tokens is
dearer, so spans of equal time shrink along the prompt. Who is free later gets a span that is shorter by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt

HALVINGS = 24  # to a hundredth of a token in the longest prompt


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker that is free ``free_s`` from now. Tokens [p, n) take it fixed_s + b (n - p) + c (n^2 - p^2) + d p seconds.

    What lies before its span comes over a link in ``hop_s`` seconds a token, every layer ``latency_s`` later.
    """

    free_s: float
    fixed_s: float
    b: float
    c: float
    d: float = 0.0
    hop_s: float = 0.0
    latency_s: float = 0.0

    def seconds(self, begin: int, end: int) -> float:
        return self.fixed_s + (end - begin) * (self.b + self.c * (end + begin)) + self.d * begin

    def reach(self, begin: float, seconds: float) -> float:
        """Where a span ends that begins at token ``begin`` and takes ``seconds``: at ``begin`` where that is too short."""
        left = seconds - self.fixed_s - self.d * begin
        if left <= 0.0:
            return begin
        slope = self.b + 2.0 * self.c * begin
        if self.c > 0.0:
            return begin + 2.0 * left / (slope + sqrt(slope * slope + 4.0 * self.c * left))  # stable where c is tiny
        return begin + left / slope if slope > 0.0 else float("inf")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [begin, end) of a prompt; seconds from now until it is begun, and until all its layers are computed."""

    begin: int
    end: int
    begins_s: float
    ends_s: float


def timed(bounds: Sequence[int], seats: Sequence[Seat], layers: int, first_s: float = 0.0) -> tuple[Span, ...]:
    """When each span is computed. ``bounds``: [workers + 1] tokens, rising. ``first_s``: what the first of them finds is all
    there only then."""
    out: list[Span] = []
    for seat, begin, end in zip(seats, bounds[:-1], bounds[1:], strict=True):
        work = seat.seconds(begin, end)
        if not out:
            out.append(Span(begin, end, seat.free_s, max(seat.free_s + work, first_s)))
            continue
        last, hop = out[-1], begin * seat.hop_s
        layer = (last.ends_s - last.begins_s) / layers
        begins = max(seat.free_s, last.begins_s + layer + hop / layers + seat.latency_s)
        came = max(last.ends_s + hop / layers, last.begins_s + hop) + seat.latency_s
        out.append(Span(begin, end, begins, max(begins + work, came + work / layers)))
    return tuple(out)


def cut(begin: int, end: int, block: int, seats: Sequence[Seat], layers: int) -> tuple[int, ...] | None:
    """[workers + 1] tokens between which the workers' spans lie, so that all end together but for the lag of a layer each.

    Inner bounds are whole blocks. None where somebody would get no block, a model of one layer leaves nothing to overlap, or
    tokens cost somebody nothing, by an estimate that knows nothing of them yet.
    """
    if layers < 2 or len(seats) < 2 or end - begin < len(seats) * block:
        return None
    low, high = 0.0, seats[0].free_s + seats[0].seconds(begin, end)  # when the first one ends
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if _bounds(begin, middle, seats, layers)[-1] < end:
            low = middle
        else:
            high = middle
    inner = _bounds(begin, high, seats, layers)[1:-1]
    if not all(map(isfinite, inner)):
        return None
    bounds = (begin, *(round(bound / block) * block for bound in inner), end)
    if any(one >= other for one, other in pairwise(bounds)):
        return None
    return bounds


def _bounds(begin: int, first_ends: float, seats: Sequence[Seat], layers: int) -> list[float]:
    """Where spans end, in tokens, if the first one ends at ``first_ends`` and every other one layer after its predecessor."""
    lead = seats[0]
    begun, ends = lead.free_s, first_ends
    out = [float(begin), lead.reach(begin, first_ends - lead.free_s)]
    for seat in seats[1:]:
        hop = out[-1] * seat.hop_s
        began = begun
        begun = max(seat.free_s, began + (ends - began + hop) / layers + seat.latency_s)
        came = max(ends + hop / layers, began + hop) + seat.latency_s
        work = (came - begun) / (1.0 - 1.0 / layers)
        out.append(seat.reach(out[-1], work))
        ends = begun + max(work, 0.0)
    return out
