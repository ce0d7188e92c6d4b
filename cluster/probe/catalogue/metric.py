"""How a metric is declared: its name, kind, unit, labels and meaning, and the numbers of ``Service.numbers`` it is told from.

Pure. Names are base units (seconds, bytes) and end with ``_total`` where they only grow. Every value of a label that is told
from numbers is listed, so that label sets are closed and a series is there, with 0, before anything of its kind happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "moonpool"


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` is without prefix and role, and without ``_total``.

    ``numbers``: value of ``labels[0]`` -> name in ``Service.numbers``; under "" where it has no label. Empty: the process
    keeps it by other means. ``buckets``: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    numbers: Mapping[str, str] | None = None
    buckets: tuple[float, ...] = ()

    def full_name(self, part: str) -> str:
        """As Prometheus knows it: ``part`` is ``process`` or that of a role."""
        ending = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self.kind, "")
        return f"{PREFIX}_{part}{'_' if self.name else ''}{self.name}{ending}"

    def series(self, part: str) -> tuple[str, ...]:
        """Names under which its samples are stored."""
        whole = self.full_name(part)
        if self.kind is not Kind.HISTOGRAM:
            return (whole,)
        return tuple(f"{whole}_{piece}" for piece in ("bucket", "sum", "count"))

    @property
    def unit(self) -> str:
        for word, unit in (("seconds", "seconds"), ("bytes", "bytes"), ("ratio", "ratio"), ("tokens", "tokens")):
            if word in self.name.split("_"):
                return unit
        return "1"


def gauge(name: str, text: str, number: str = "") -> Metric:
    """``number``: where it is called otherwise in ``Service.numbers``."""
    return Metric(name, Kind.GAUGE, text, numbers={"": number or name})


def gauges(name: str, text: str, label: str, numbers: Mapping[str, str]) -> Metric:
    return Metric(name, Kind.GAUGE, text, (label,), numbers)


def counter(name: str, text: str, number: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, text, numbers={"": number or name})


def counters(name: str, text: str, label: str, numbers: Mapping[str, str]) -> Metric:
    return Metric(name, Kind.COUNTER, text, (label,), numbers)


def kept(name: str, kind: Kind, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = ()) -> Metric:
    """One that is counted where it happens, not told from numbers."""
    return Metric(name, kind, text, tuple(labels), None, tuple(buckets))


def by(pattern: str, *values: str) -> dict[str, str]:
    """Label value -> number, where the numbers are called alike: ``*`` stands for the value."""
    return {value: pattern.replace("*", value) for value in values}
