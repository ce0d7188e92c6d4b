"""The conductor: events and ``now`` in, placements and actions out. Pure: no clock, no thread, no socket.

All it knows is rebuilt from the others' messages, so any number of conductors may run and any of them may die. ``now``
is one monotonic clock in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.membership import MemberChange, WorkerReport
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal, Segment
from moonpool.scheduler.board import Board, Usable
from moonpool.scheduler.bookings import Booking
from moonpool.scheduler.candidates import usable
from moonpool.scheduler.choice import Option, choose, missed
from moonpool.scheduler.decisions import Decision, DecisionLog, decode_candidates, prefill_candidates
from moonpool.scheduler.estimates import Overhead
from moonpool.scheduler.min_ttft import Held, PrefillScores, Prompt, depths, score_decode, score_prefill, segments
from moonpool.scheduler.view import View

COUNTERS = (
    "refusals_no_path",
    "refusals_targets_missed",
    "bookings_expired",
    "bookings_ended_by_report",
    "reports_ignored",
    "events_ignored",
    "event_gaps",
    "cached_tokens_predicted",
    "cached_tokens_actual",
)


@dataclass(frozen=True, slots=True)
class Resync:
    """Events of ``holder``'s store node are missing: watch it anew, beginning with a snapshot."""

    holder: NodeId


Action = Resync
Event = MemberChange | EventBatch | IndexSnapshot | WorkerReport


class Conductor:
    def __init__(self, *, booking_s: float = 120.0, log_limit: int = 10_000) -> None:
        """``booking_s``: total budget of a request, after which nothing of it can be alive."""
        self._view = View(booking_s)
        self._log = DecisionLog(log_limit)
        self._overhead = Overhead()
        self._placements = 0

    def observe(self, event: Event, now: float) -> list[Action]:
        view = self._view
        view.expire(now)
        view.sweep()
        match event:
            case MemberChange():
                view.on_member(event)
            case WorkerReport():
                view.on_report(event, now)
            case EventBatch() | IndexSnapshot():
                if not view.on_blocks(event):
                    return [Resync(NodeId(event.holder))]
        return []

    def next_number(self, node: NodeId, incarnation: Incarnation) -> int:
        """The number of the next event wanted from this life of a node's store; 0: a snapshot is wanted."""
        return self._view.pool.next_number(node, incarnation)

    def place(self, request: PlaceRequest, now: float) -> Placement | Refusal:
        """Books what it answers. An earlier booking of the same request (another attempt, a retried call) ends."""
        self._view.expire(now)
        self._view.release(request.request)
        board = self._view.board
        record = Decision(replace(request, keys=()), len(request.keys), now, overhead_s=self._overhead.seconds)
        self._log.add(record)
        rows = usable(board, self._view.stores, request)
        if isinstance(rows, Refusal):
            self._view.counts["refusals_no_path"] += 1
            record.outcome = rows
        else:
            record.outcome = self._place(request, rows, board, record, now)
        return record.outcome

    def _place(self, request: PlaceRequest, rows: Usable, board: Board, record: Decision, now: float) -> Placement | Refusal:
        prompt = Prompt(request.prompt_tokens, len(request.keys), self._view.block_tokens)
        held, deepest = self._held(request.keys, board, rows)
        prefill = score_prefill(board, rows.pooled, prompt, held, record.overhead_s, now)
        decode = score_decode(board, prompt)
        option = record.option = choose(board, request.targets, prompt, rows, prefill, decode)
        record.prefill = prefill_candidates(board, rows, prefill, option.prefill)
        record.decode = decode_candidates(board, rows, decode, option.decode)
        record.cached_tokens = int(prefill.cached[option.prefill])
        if not option.meets(request.targets):
            self._view.counts["refusals_targets_missed"] += 1
            return missed(option, request.targets, board)
        self._placements += 1
        self._book(request, option, float(prefill.work[option.prefill]), record.cached_tokens, board, now)
        return Placement(
            board.workers[option.prefill].ref,
            board.workers[option.decode].ref,
            self._plan(prompt, held, prefill, deepest, board, option.prefill),
            option.ttft.likely * 1e3 if option.ttft.sure else 0.0,
            option.tbt.likely * 1e3 if option.tbt.sure else 0.0,
            self._placements,
        )

    def _held(self, keys: tuple[bytes, ...], board: Board, rows: Usable) -> tuple[Held, list[NodeId]]:
        """What is held where, and the nodes that hold the most, by name."""
        devices, pool = self._view.devices, self._view.pool
        own = depths(devices.match(keys), devices.bits)[board.device_bit]
        runs = pool.match(keys)
        node = depths(runs, pool.bits)[board.node_bit]
        for depth, mask in reversed(runs):
            names = sorted(NodeId(name) for name in pool.names(mask) if name not in rows.barred)
            if names:
                return Held(own, node, depth), names
        return Held(own, node, 0), []

    def _plan(
        self, prompt: Prompt, held: Held, scores: PrefillScores, deepest: list[NodeId], board: Board, row: int
    ) -> tuple[Segment, ...]:
        local, far = (int(blocks) for blocks in scores.covered[:, row])
        source = deepest[self._placements % len(deepest)] if deepest else None  # equal holders take turns
        node = board.workers[row].member.node
        return segments(prompt, int(held.own[row]), local, far if scores.fetches[row] else local, node, source)

    def _book(self, request: PlaceRequest, option: Option, work_s: float, cached_tokens: int, board: Board, now: float) -> None:
        self._view.book(
            Booking(
                self._placements,
                request.request,
                request.attempt,
                board.names[option.prefill],
                board.names[option.decode],
                work_s,
                request.prompt_tokens,
                cached_tokens,
                now,
                now + option.ttft.likely,
            )
        )

    def finished(self, done: Finished, now: float) -> None:
        """An attempt is over, however it ended. Unknown and repeated ones change nothing."""
        self._view.expire(now)
        self._view.release(done.request, done.attempt)
        decisions = self._log.of(done.request)
        for decision in decisions:
            if decision.request.attempt == done.attempt and decision.actual is None:
                decision.actual = done
                self._learn(decision, done, first=decision is decisions[0])

    def _learn(self, decision: Decision, done: Finished, *, first: bool) -> None:
        option = decision.option
        if done.ttft_ms <= 0.0 or option is None or not isinstance(decision.outcome, Placement):
            return
        self._view.counts["cached_tokens_predicted"] += decision.cached_tokens
        self._view.counts["cached_tokens_actual"] += done.cached_tokens
        if first and option.ttft.sure and option.wait_s == 0.0:  # a later attempt's TTFT contains the earlier ones
            self._overhead.add(done.ttft_ms / 1e3 - (option.ttft.likely - decision.overhead_s))

    def explain(self, request: str) -> dict[str, Any] | None:
        """Every recorded decision about ``request``, JSON-able; None where none is remembered."""
        return self._log.explain(request)

    def numbers(self, now: float) -> dict[str, float]:
        """Gauges and counters. ``bookings`` and ``attempts_reported`` are 0 when the cluster is idle."""
        self._view.expire(now)
        return {
            **self._view.numbers(),
            "decisions_recorded": float(len(self._log)),
            "placements": float(self._placements),
            "first_token_overhead_seconds": self._overhead.seconds,
            **{name: float(self._view.counts[name]) for name in COUNTERS},
        }
