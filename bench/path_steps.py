"""The waterfall of one request: consecutive steps from the client's first byte to its first text, by process. Pure.

All processes of a local cluster stamp instants of one machine's monotonic clock, so those of two may be subtracted here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moonpool.core.errors import ConfigError
from moonpool.core.lifetime import Instant

Mode = Literal["both", "split"]
Where = Literal["client", "gateway", "conductor", "decode", "prefill"]  # a worker of role both is its decode worker
Point = tuple[Where, str]
Points = Mapping[Point, float]  # seconds

SENT, TEXT = "sent", "text"  # what a client stamps: its request leaves, its first text is there


@dataclass(frozen=True, slots=True)
class Step:
    """From ``begin`` to ``end``. ``inside``: it lies within another step and is no part of the sum."""

    name: str
    begin: Point
    end: Point
    inside: bool = False


def _chain(points: Sequence[tuple[str, Where, str]], first: Point) -> list[Step]:
    steps = []
    for name, where, instant in points:
        steps.append(Step(name, first, (where, instant)))
        first = (where, instant)
    return steps


_I = Instant
_IN: list[tuple[str, Where, str]] = [
    ("head", "gateway", _I.ARRIVED),  # connection, request head, routing
    ("body", "gateway", _I.READ),
    ("parse", "gateway", _I.PARSED),
    ("tokenise", "gateway", _I.TOKENISED),  # and hash into block keys
    ("place", "gateway", _I.PLACED),
    ("open", "decode", _I.ADMITTED),  # the attempt on the token stream, to the worker's admission
]
_OUT: list[tuple[str, Where, str]] = [
    ("back", "gateway", _I.FIRST_TOKEN),  # the id, from the worker to the gateway
    ("text", "client", TEXT),  # detokenised, written, read by the client
]
_DECIDE = Step("decide", ("conductor", _I.ARRIVED), ("conductor", _I.PLACED), inside=True)
STEPS: dict[Mode, list[Step]] = {
    "both": [
        *_chain(
            [
                *_IN,
                ("queue", "decode", _I.PREFILL_BEGUN),
                ("prefix", "decode", _I.RUNNABLE),  # what the pool has beyond the device pages
                ("compute", "decode", _I.FIRST_TOKEN),
                *_OUT,
            ],
            ("client", SENT),
        ),
        _DECIDE,
    ],
    "split": [
        *_chain(
            [
                *_IN,
                ("queue", "decode", _I.QUEUED),
                ("call", "prefill", _I.QUEUED),  # the job, to the prefill worker
                ("turn", "prefill", _I.PREFILL_BEGUN),
                ("landing", "prefill", _I.LANDING_GRANTED),
                ("prefix", "prefill", _I.PREFIX_LOADED),
                ("compute", "prefill", _I.FIRST_TOKEN),
                ("tell", "decode", _I.FIRST_TOKEN),
                *_OUT,
            ],
            ("client", SENT),
        ),
        _DECIDE,
    ],
}


def steps_ms(mode: Mode, points: Points) -> dict[str, float]:
    """Milliseconds of each step, and ``whole``. ConfigError names an instant that nobody stamped."""
    out = {}
    for step in STEPS[mode]:
        for where, instant in (step.begin, step.end):
            if (where, instant) not in points:
                raise ConfigError(f"bench: no {where} told when a request was {str(instant)!r}", param="bench")
        out[step.name] = (points[step.end] - points[step.begin]) * 1e3
    out["whole"] = (points["client", TEXT] - points["client", SENT]) * 1e3
    return out


def middle(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of every step, for itself: their sum need not be the median of sums."""
    return {name: statistics.median(one[name] for one in samples) for name in samples[0]}
