"""One record per decision: what was asked, what was considered, what was answered, what came of it."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal
from moonpool.scheduler.board import Board, Bools, Floats, Usable
from moonpool.scheduler.choice import Option
from moonpool.scheduler.costs import DecodeScores, PrefillScores

CANDIDATES = 16  # kept per decision and stage: the best ones
PREFILL_COLUMNS = ("ttft_ms", "ttft_high_ms", "wait_ms", "work_ms", "cached_tokens", "sure")
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


def _candidates(board: Board, rows: Bools, order: Floats, chosen: int, table: Floats) -> Candidates:
    """The best rows by ``order``, ``chosen`` first. ``table`` is [columns, rows of the board]."""
    (usable,) = rows.nonzero()
    best = usable if len(usable) <= CANDIDATES else usable[np.argpartition(order[usable], CANDIDATES)[:CANDIDATES]]
    kept = [chosen, *[row for row in best.tolist() if row != chosen][: CANDIDATES - 1]]
    return Candidates(board.names, kept, table[:, kept].astype(np.float32), len(usable))


def prefill_candidates(board: Board, usable: Usable, scores: PrefillScores, chosen: int) -> Candidates:
    return _candidates(board, usable.prefills, scores.ttft, chosen, scores.table)


def decode_candidates(board: Board, usable: Usable, scores: DecodeScores, chosen: int) -> Candidates:
    table = np.array((scores.tbt, board.batch, board.context, scores.roomy), np.float64)
    return _candidates(board, usable.decodes | usable.both, scores.tbt, chosen, table)


@dataclass(slots=True)
class Decision:
    """``at`` is the conductor's monotonic clock in seconds. The prompt's keys are not kept, only how many there were."""

    request: PlaceRequest  # without keys
    blocks: int
    at: float
    outcome: Placement | Refusal | None = None  # None only while it is being decided
    prefill: Candidates | None = None  # None: there was nobody to consider
    decode: Candidates | None = None
    option: Option | None = None
    cached_tokens: int = 0  # predicted
    overhead_s: float = 0.0
    actual: Finished | None = None

    def told(self) -> dict[str, Any]:
        """JSON-able."""
        asked = asdict(self.request)
        del asked["keys"], asked["request"]
        out: dict[str, Any] = {"at_s": round(self.at, 6), "asked": {**asked, "blocks": self.blocks}}
        if self.prefill is not None:
            out["prefill_candidates"] = self.prefill.rows(PREFILL_COLUMNS)
            out["prefill_considered"] = self.prefill.considered
        if self.decode is not None:
            out["decode_candidates"] = self.decode.rows(DECODE_COLUMNS)
            out["decode_considered"] = self.decode.considered
        if self.outcome is not None:
            out["placed" if isinstance(self.outcome, Placement) else "refused"] = asdict(self.outcome)
        if self.option is not None:
            out["predicted"] = {
                "wait_ms": self.option.wait_s * 1e3,
                "ttft_ms": self.option.ttft.likely * 1e3,
                "ttft_high_ms": self.option.ttft.high * 1e3,
                "ttft_sure": self.option.ttft.sure,
                "tbt_ms": self.option.tbt.likely * 1e3,
                "tbt_high_ms": self.option.tbt.high * 1e3,
                "tbt_sure": self.option.tbt.sure,
                "cached_tokens": self.cached_tokens,
            }
        out["actual"] = None if self.actual is None else asdict(self.actual)
        return out


class DecisionLog:
    """The newest ``limit`` decisions, found by request."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order: deque[str] = deque()  # request of each decision, oldest first
        self._by_request: dict[str, deque[Decision]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, decision: Decision) -> None:
        name = decision.request.request
        self._order.append(name)
        self._by_request.setdefault(name, deque()).append(decision)
        if len(self._order) > self._limit:
            oldest = self._order.popleft()
            mine = self._by_request[oldest]
            mine.popleft()
            if not mine:
                del self._by_request[oldest]

    def of(self, request: str) -> list[Decision]:
        return list(self._by_request.get(request, ()))

    def explain(self, request: str) -> dict[str, Any] | None:
        found = self.of(request)
        return {"request": request, "decisions": [decision.told() for decision in found]} if found else None
