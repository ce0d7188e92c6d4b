"""The steps of a request's life in each process, as differences of two instants: for histograms and traces. Pure.

The numbers are those of docs/architecture.md, "One request, ten steps". Steps of one process overlap where the work does:
layers land while later ones are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime


@dataclass(frozen=True, slots=True)
class Step:
    """``begins``: the first of these instants that happened. ``number``: which of the ten steps it is."""

    name: str
    number: int
    begins: tuple[Instant, ...]
    ends: Instant
    text: str


_I = Instant
STEPS: dict[Role, tuple[Step, ...]] = {
    Role.GATEWAY: (
        Step("tokenise", 1, (_I.ARRIVED,), _I.TOKENISED, "arrival to tokens and block names"),
        Step("place", 2, (_I.TOKENISED,), _I.PLACED, "asking a conductor, its queue included"),
        Step("open", 4, (_I.PLACED,), _I.ADMITTED, "opening the first attempt on its token stream"),
        Step("first_token", 8, (_I.ADMITTED,), _I.FIRST_TOKEN, "waiting for the first id"),
        Step("stream", 9, (_I.FIRST_TOKEN,), _I.FINISHED, "streaming the answer"),
    ),
    Role.PREFILL: (
        Step("queue", 5, (_I.QUEUED,), _I.PREFILL_BEGUN, "waiting for its turn"),
        Step("landing", 5, (_I.PREFILL_BEGUN,), _I.LANDING_GRANTED, "pages, and a landing at the decode host"),
        Step("prefix", 6, (_I.LANDING_GRANTED,), _I.PREFIX_LOADED, "finding and loading what need not be computed"),
        Step("compute", 7, (_I.PREFIX_LOADED,), _I.LAST_LAYER_COMPUTED, "computing the rest, layers leaving meanwhile"),
        Step("sample", 8, (_I.LAST_LAYER_COMPUTED,), _I.FIRST_TOKEN, "drawing the first id"),
        Step("drain", 7, (_I.FIRST_TOKEN,), _I.FINISHED, "the last layers leaving"),
    ),
    Role.DECODE: (
        Step("queue", 4, (_I.ADMITTED,), _I.QUEUED, "waiting for pages"),
        Step("first_token", 8, (_I.QUEUED, _I.PREFILL_BEGUN), _I.FIRST_TOKEN, "prefill, wherever it is"),
        Step("land", 9, (_I.FIRST_TOKEN,), _I.LAST_LAYER_LANDED, "the last layers coming in after the first id"),
        Step("join", 9, (_I.LAST_LAYER_LANDED,), _I.RUNNABLE, "copying them into pages"),
        Step("decode", 9, (_I.RUNNABLE,), _I.FINISHED, "computing the answer"),
    ),
    Role.CONDUCTOR: (
        Step("decide", 3, (_I.ARRIVED,), _I.PLACED, "placing it, waiting in the conductor's queue included"),
        Step("refuse", 3, (_I.ARRIVED,), _I.REFUSED, "refusing it"),
    ),
    Role.STORE: (
        Step("land", 7, (_I.LANDING_GRANTED,), _I.SEALED, "a landing, until every slice is verified"),
        Step("hold", 10, (_I.SEALED, _I.CANCELLED), _I.FINISHED, "until its reader is through"),
    ),
}


def steps_of(role: Role) -> tuple[Step, ...]:
    """Role both lives as a decode worker does."""
    return STEPS.get(Role.DECODE if role is Role.BOTH else role, ())


def told(role: Role, life: Lifetime) -> Iterator[tuple[Step, float, float]]:
    """(step, its begin, its end) of what happened of ``life``; an end before its begin counts as none."""
    for step in steps_of(role):
        begin = next((life.at[instant] for instant in step.begins if instant in life.at), None)
        end = life.at.get(step.ends)
        if begin is not None and end is not None and end >= begin:
            yield step, begin, end
