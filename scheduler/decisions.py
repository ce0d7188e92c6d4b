"""One record per decision: what was asked, what was considered, what was answered, what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.ids import NodeId
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal
from moonpool.scheduler.board import Bools, Floats
from moonpool.scheduler.choice import Option, Share
from moonpool.scheduler.policy import Asked

CANDIDATES = 16  # kept per decision and stage: the best ones
PREFILL_COLUMNS = (
    *("ttft_ms", "ttft_high_ms", "wait_ms", "work_ms", "cached_tokens", "sure"),
    *("own_blocks", "node_blocks"),  # leading blocks in the worker's own pages, and in its node's pool
)
DECODE_COLUMNS = ("tbt_ms", "batch", "context_tokens", "roomy")


@dataclass(frozen=True, slots=True)
class Candidates:
    """``values`` is [columns, len(kept)], the chosen worker first; ``considered`` counts those not kept, too."""

    names: tuple[str, ...]  # of every worker on the board, shared between decisions
    kept: list[int]
    values: NDArray[np.float32]
    considered: int

    def rows(self, columns: tuple[str, ...]) -> list[dict[str, Any]]:
        """Times in ms, rounded."""
        out: list[dict[str, Any]] = []
        for i, row in enumerate(self.kept):
            values = [float(v) for v in self.values[:, i]]
            numbers = {
                name: round(v * 1e3, 3) if name.endswith("_ms") else int(v) for name, v in zip(columns, values, strict=True)
            }
            out.append({"worker": self.names[row], **numbers})
        return [out[0], *sorted(out[1:], key=lambda candidate: float(candidate[columns[0]]))] if out else out


def _best(rows: Bools, order: Floats, chosen: int) -> tuple[list[int], int]:
    """The best rows by ``order``, ``chosen`` first, and how many there are in all."""
    (usable,) = rows.nonzero()
    best = usable if len(usable) <= CANDIDATES else usable[np.argpartition(order[usable], CANDIDATES)[:CANDIDATES]]
    return [chosen, *[row for row in best.tolist() if row != chosen][: CANDIDATES - 1]], len(usable)


def prefill_candidates(asked: Asked, chosen: int) -> Candidates:
    scores, held = asked.scores, asked.held
    kept, considered = _best(asked.usable.prefills, scores.ttft, chosen)
    values = np.empty((len(PREFILL_COLUMNS), len(kept)), np.float32)
    values[:6], values[6], values[7] = scores.table[:, kept], held.own[kept], held.node[kept]
    return Candidates(asked.board.names, kept, values, considered)


def decode_candidates(asked: Asked, chosen: int) -> Candidates:
    board, scores = asked.board, asked.decode
    kept, considered = _best(asked.usable.decodes | asked.usable.both, scores.tbt, chosen)
    values = np.array((scores.tbt[kept], board.batch[kept], board.context[kept], scores.roomy[kept]), np.float32)
    return Candidates(board.names, kept, values, considered)


@dataclass(slots=True)
class Decision:
    """``at`` is the conductor's monotonic clock in seconds. The prompt's keys are not kept, only how many there were."""

    request: PlaceRequest  # without keys
    blocks: int
    at: float
    policy: str = ""
    admission: str = ""
    outcome: Placement | Refusal | None = None  # None only while it is being decided, or waits
    prefill: Candidates | None = None  # None: there was nobody to consider
    decode: Candidates | None = None
    option: Option | None = None
    cached_tokens: int = 0  # predicted
    overhead_s: float = 0.0
    waited_s: float = 0.0  # in the conductor's queue
    deepest: int = 0  # leading blocks held by somebody's pool
    holders: tuple[NodeId, ...] = ()
    flows: int = 0  # transfers under way when it was decided
    judged: Mapping[str, float] = field(default_factory=dict)  # the admission's numbers
    actual: Finished | None = None

    @property
    def predicted_ttft_s(self) -> float | None:
        """From the request's arrival at the conductor; None where no worker was found."""
        return None if self.option is None else self.waited_s + self.option.ttft.likely

    @property
    def regret_s(self) -> float | None:
        """How much later the first token came than the best candidate had been predicted to send it; at least 0."""
        if self.actual is None or self.actual.ttft_ms <= 0.0 or self.prefill is None or not len(self.prefill.kept):
            return None
        return max(self.actual.ttft_ms / 1e3 - self.waited_s - float(self.prefill.values[0].min()), 0.0)

    def told(self) -> dict[str, Any]:
        """JSON-able."""
        asked = asdict(self.request)
        del asked["keys"], asked["request"]
        out: dict[str, Any] = {
            "at_s": round(self.at, 6),
            "policy": self.policy,
            "admission": self.admission,
            "asked": {**asked, "blocks": self.blocks},
            "held": {"deepest_blocks": self.deepest, "holders": list(self.holders)},
            "waited_ms": self.waited_s * 1e3,
            "judged": dict(self.judged),
        }
        if self.prefill is not None:
            out["prefill_candidates"] = self.prefill.rows(PREFILL_COLUMNS)
            out["prefill_considered"] = self.prefill.considered
        if self.decode is not None:
            out["decode_candidates"] = self.decode.rows(DECODE_COLUMNS)
            out["decode_considered"] = self.decode.considered
        if self.outcome is not None:
            out["placed" if isinstance(self.outcome, Placement) else "refused"] = asdict(self.outcome)
        if self.option is not None:
            out["predicted"] = _predicted(self.option, self.waited_s)
            out["transfer"] = _transfer(self.option, self.flows)
            if self.option.group and self.prefill is not None:
                out["group"] = [_share(share, self.prefill.names) for share in self.option.group]
        out["actual"] = None if self.actual is None else asdict(self.actual)
        out["regret_ms"] = None if self.regret_s is None else self.regret_s * 1e3
        return out


def _predicted(option: Option, waited_s: float) -> dict[str, Any]:
    return {
        "wait_ms": option.wait_s * 1e3,
        "work_ms": option.work_s * 1e3,
        "ttft_ms": (waited_s + option.ttft.likely) * 1e3,
        "ttft_high_ms": (waited_s + option.ttft.high) * 1e3,
        "ttft_sure": option.ttft.sure,
        "tbt_ms": option.tbt.likely * 1e3,
        "tbt_high_ms": option.tbt.high * 1e3,
        "tbt_sure": option.tbt.sure,
        "cached_tokens": option.cached_tokens,
    }


def _transfer(option: Option, flows: int) -> dict[str, Any]:
    plan = option.plan
    return {
        "source": plan.source,
        "blocks": max(plan.until - plan.local - plan.front, 0) if plan.source is not None else 0,
        "computed_meanwhile": plan.front,
        "ms": option.transfer_s * 1e3,
        "flows_under_way": flows,
    }


def _share(share: Share, names: tuple[str, ...]) -> dict[str, Any]:
    """Tokens [begin, end) at one worker of a group; ms from the placement on."""
    span = share.span
    return {
        "worker": names[share.row],
        "begin": span.begin,
        "end": span.end,
        "begins_ms": round(span.begins_s * 1e3, 3),
        "ends_ms": round(span.ends_s * 1e3, 3),
    }


class DecisionLog:
    """The newest ``limit`` decisions, found by request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order: deque[Decision] = deque()  # oldest first
        self._by_request: dict[str, deque[Decision]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, decision: Decision) -> None:
        self._order.append(decision)
        self._by_request.setdefault(decision.request.request, deque()).append(decision)
        if len(self._order) > self._limit:
            oldest = self._order.popleft().request.request
            mine = self._by_request[oldest]
            mine.popleft()
            if not mine:
                del self._by_request[oldest]

    def of(self, request: str) -> list[Decision]:
        return list(self._by_request.get(request, ()))

    def newest(self, count: int) -> list[Decision]:
        """The oldest of them first."""
        return list(self._order)[-count:] if count > 0 else []

    def explain(self, request: str) -> dict[str, Any] | None:
        found = self.of(request)
        return {"request": request, "decisions": [decision.told() for decision in found]} if found else None
