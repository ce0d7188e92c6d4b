"""HTTP requests as one looks at them from outside: where each one under way is, and how the newest ones went."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.cluster.gateway.attempts import slowest_tenth
from moonpool.cluster.overview.told import Recent
from moonpool.core.lifetime import Instant, Lifetime

if TYPE_CHECKING:
    from moonpool.cluster.gateway.endpoints import Visit

KEPT = 256  # requests that ended
MEASURED = 1_024  # answers whose times are kept for quantiles
WINDOW_S = 60.0
_FOR_NOW = (429, 503)  # refusals: the same request may be served a moment later


@dataclass(frozen=True, slots=True)
class Flight:
    """One request. ``id`` is ours, ``theirs`` what its client sent; ``runs`` are the names its choices go by.

    ``stage``: reading, tokenising, placing, prefill, decode, or ended, with ``outcome`` then. ``prefill`` and ``decode``
    are the workers of the first choice's newest placement. Tokens are of all choices together.
    """

    id: str
    theirs: str
    endpoint: str
    tenant: str
    model: str
    kind: str
    runs: tuple[str, ...]
    stage: str
    outcome: str
    prefill: str
    decode: str
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    arrived_at: float  # seconds since the epoch
    seconds: float  # since then, or until it ended
    ttft_ms: float | None
    tokens_per_s: float | None  # generated since the first one


def as_flight(visit: Visit, now: float, theirs: str, outcome: str = "") -> Flight:
    """``now``: of the clock that the visit's instants are of. ``outcome`` where it has ended."""
    runs = visit.generation.runs if visit.generation is not None else ()
    first = runs[0] if runs else None
    life = first.lifetime if first is not None else visit.lifetime
    placed = life.tries[-1].facts if life.tries else {}
    arrived = visit.lifetime.at[Instant.ARRIVED]
    until = max((run.lifetime.at.get(Instant.FINISHED, 0.0) for run in runs), default=0.0) if outcome else now
    generated = sum(len(run.ledger.emitted) for run in runs)
    ttft_s = life.between(Instant.ARRIVED, Instant.FIRST_TOKEN)
    streamed_s = until - life.at[Instant.FIRST_TOKEN] if Instant.FIRST_TOKEN in life.at else 0.0
    return Flight(
        visit.id,
        theirs if theirs != visit.id else "",
        visit.endpoint,
        visit.ticket.caller.tenant,
        visit.model.name if visit.model is not None else "",
        first.ledger.request.kind if first is not None else "",
        tuple(str(run.ledger.request.id) for run in runs),
        "ended" if outcome else _stage(visit, life, "decode" in placed),
        outcome,
        str(placed.get("prefill", "")),
        str(placed.get("decode", "")),
        max((run.ledger.number for run in runs), default=0),
        sum(len(run.ledger.request.prompt) for run in runs),
        sum(run.ledger.cached_tokens for run in runs),
        generated,
        sum(run.ledger.request.sampling.max_tokens for run in runs),
        time.time() - (now - arrived),
        (until or now) - arrived,
        None if ttft_s is None else ttft_s * 1e3,
        (generated - len(runs)) / streamed_s if generated > len(runs) and streamed_s > 0.0 else None,
    )


def _stage(visit: Visit, life: Lifetime, placed: bool) -> str:
    if visit.generation is None:
        return "tokenising" if visit.body_bytes else "reading"
    if not placed:
        return "placing"
    return "decode" if Instant.FIRST_TOKEN in life.at else "prefill"


class RecentFlights:
    """The newest requests of one gateway that ended. Event loop only; all of it bounded."""

    def __init__(self) -> None:
        self._ended: deque[Flight] = deque(maxlen=KEPT)
        self._times: deque[tuple[float, float, float]] = deque(maxlen=MEASURED)  # (finished, ttft, tbt) in seconds
        self._refused: Counter[str] = Counter()

    def ended(self, visit: Visit, now: float, theirs: str) -> None:
        self._ended.append(as_flight(visit, now, theirs, visit.outcome))
        if visit.outcome != "ok" or visit.generation is None:
            return
        for run in visit.generation.runs:
            ttft = run.lifetime.between(Instant.ARRIVED, Instant.FIRST_TOKEN)
            if ttft is not None:
                self._times.append((now, ttft, slowest_tenth(run.attempts.arrivals)))

    def refused(self, reason: str, http_status: int) -> None:
        """``reason``: of a closed set."""
        if http_status in _FOR_NOW:
            self._refused[reason] += 1

    def newest(self, most: int) -> list[Flight]:
        """The newest first."""
        return list(self._ended)[: -most - 1 : -1] if most > 0 else []

    def find(self, name: str) -> Flight | None:
        """By our id, or by that of a choice."""
        return next((one for one in reversed(self._ended) if name == one.id or name in one.runs), None)

    def word(self, now: float) -> str:
        """Figures of the last minute, as ``overview.told`` reads them."""
        lately = [(ttft, tbt) for at, ttft, tbt in self._times if at > now - WINDOW_S]
        tbts = [tbt for _, tbt in lately if tbt > 0.0]
        return Recent(
            WINDOW_S, len(lately), _quantiles(ttft for ttft, _ in lately), _quantiles(tbts), dict(self._refused)
        ).word()


def _quantiles(seconds: Iterable[float]) -> tuple[float, float] | None:
    """Median and 90th percentile, in ms."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    last = len(ordered) - 1
    return round(ordered[round(last * 0.5)] * 1e3, 2), round(ordered[round(last * 0.9)] * 1e3, 2)
