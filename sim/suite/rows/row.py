"""One row of the comparison: the runs it needs, the figure it makes of them, and what that figure must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from moonpool.sim.suite.settings import AnyRun
from moonpool.sim.suite.workload import TraceName

Figures = Mapping[str, float]
Value = Callable[[Sequence[Figures]], float]

SEEDS = (1, 2, 3)  # of the shuffled variants that are reported; constants are chosen on other ones
NODES = (5, 6, 7, 8)
TRACES: tuple[TraceName, ...] = ("conversation", "synthetic")


@dataclass(frozen=True, slots=True)
class Target:
    """Both ends included; None: no bound."""

    least: float | None = None
    most: float | None = None

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        match self.least, self.most:
            case None, None:
                return "-"
            case least, None:
                return f">= {least:.4g}"
            case None, most:
                return f"<= {most:.4g}"
            case least, most:
                return f"{least:.4g} to {most:.4g}"


@dataclass(frozen=True, slots=True)
class Row:
    """``value`` and each of ``beside`` (shown, not judged) get the figures of ``runs`` in their order. A ``stretch`` row is
    told apart: to miss it is not to miss the target."""

    name: str
    what: str
    reference: str
    runs: tuple[AnyRun, ...]
    value: Value
    target: Target
    stretch: bool = False
    beside: tuple[tuple[str, Value], ...] = ()


def near(value: float, by: float) -> Target:
    return Target(value - by, value + by)


def figure(name: str, at: int = 0) -> Value:
    return lambda figures: figures[at][name]


def share(name: str, of: float, at: int = 0) -> Value:
    return lambda figures: figures[at][name] / of


def always(value: float) -> Value:
    return lambda figures: value


def change(name: str, ours: int, theirs: int) -> Value:
    """Relative: -0.25 where ours is a quarter less."""
    return lambda figures: figures[ours][name] / figures[theirs][name] - 1.0


def ratio(name: str, ours: int, theirs: int, floor: float = 0.0) -> Value:
    """``floor``: what the other is taken for at least, where it may be nothing at all."""
    return lambda figures: figures[ours][name] / max(figures[theirs][name], floor)


def mean_change(name: str) -> Value:
    """Of runs that come in pairs (ours, theirs), one pair a seed."""
    return lambda figures: fmean(
        ours[name] / theirs[name] - 1.0 for ours, theirs in zip(figures[::2], figures[1::2], strict=True)
    )


def mean_of(name: str) -> Value:
    return lambda figures: fmean(one[name] for one in figures)
