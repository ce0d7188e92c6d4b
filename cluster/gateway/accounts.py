"""From a visit that left to its line in the usage log."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from moonpool.cluster.gateway.shapes import Usage
from moonpool.cluster.gateway.usage_log import UsageLine, UsageLog
from moonpool.core.lifetime import Instant

if TYPE_CHECKING:
    from moonpool.cluster.gateway.endpoints import Visit

_MS_DIGITS = 3


class Accounts:
    """``now``: the clock of visits' instants, in seconds. ``gateway``: this one's member id."""

    def __init__(self, log: UsageLog, gateway: str, now: Callable[[], float]) -> None:
        self.log, self._gateway, self._now = log, gateway, now

    def left(self, visit: Visit, taken: Usage) -> None:
        """``taken``: what the tenant is charged for."""
        runs = visit.generation.runs if visit.generation is not None else ()
        ttft = [t for run in runs if (t := run.lifetime.between(Instant.ARRIVED, Instant.FIRST_TOKEN)) is not None]
        seconds = self._now() - visit.lifetime.at[Instant.ARRIVED]
        self.log.add(
            UsageLine(
                time=datetime.now(UTC).isoformat(timespec="milliseconds"),
                id=visit.id,
                tenant=visit.ticket.caller.tenant,
                model=visit.model.name if visit.model is not None else "",
                endpoint=visit.endpoint,
                outcome=visit.outcome,
                prompt_tokens=taken.prompt,
                cached_tokens=taken.cached,
                completion_tokens=taken.completion,
                choices=len(runs),
                attempts=sum(run.ledger.number for run in runs),
                ttft_ms=round(1_000 * min(ttft), _MS_DIGITS) if ttft else None,
                duration_ms=round(1_000 * seconds, _MS_DIGITS),
                gateway=self._gateway,
            )
        )

    def numbers(self) -> dict[str, float]:
        return {"usage_lines_written": float(self.log.written), "usage_lines_dropped": float(self.log.dropped)}
