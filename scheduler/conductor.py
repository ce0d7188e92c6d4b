"""The conductor: events and ``now`` in, placements and actions out. Pure: no clock, no thread, no socket.

What it knows is soft: membership, two prefix indexes (device pages of workers, pools of nodes), the workers' reports, and
bookings for what it placed since. All of it is rebuilt from the others' messages, so any number of conductors may run and
any of them may die. ``now`` is one monotonic clock in seconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from moonpool.core.events import EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange, WorkerReport
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal, Segment
from moonpool.scheduler.board import NO_BIT, Board, Worker, seconds_of
from moonpool.scheduler.bookings import Booking, Ledger
from moonpool.scheduler.candidates import Usable, usable
from moonpool.scheduler.choice import Option, choose, missed
from moonpool.scheduler.decisions import Decision, DecisionLog, decode_candidates, prefill_candidates
from moonpool.scheduler.estimates import Fit, Overhead, PrefillEstimate, StepEstimate
from moonpool.scheduler.min_ttft import Held, PrefillScores, Prompt, depths, score_decode, score_prefill, segments
from moonpool.scheduler.prefix_index import Applied, PrefixIndex

WORKER_ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
SWEPT_PER_EVENT = 2_000  # index entries: about a millisecond
DEFAULT_BLOCK_TOKENS = 64  # until a member with a layout is known
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
        self._workers: dict[MemberId, Worker] = {}
        self._stores: dict[NodeId, Member] = {}
        self._devices = PrefixIndex(Tier.G1)
        self._pool = PrefixIndex(Tier.G2)
        self._ledger = Ledger(booking_s)
        self._log = DecisionLog(log_limit)
        self._of_role = {role: (PrefillEstimate(), StepEstimate()) for role in WORKER_ROLES}
        self._overhead = Overhead()
        self._board: Board | None = None  # None: membership changed since
        self._block_tokens = DEFAULT_BLOCK_TOKENS
        self._counts: Counter[str] = Counter()
        self._placements = 0

    # -- events --------------------------------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> list[Action]:
        self._expire(now)
        self._devices.sweep(SWEPT_PER_EVENT)
        self._pool.sweep(SWEPT_PER_EVENT)
        match event:
            case MemberChange():
                self._on_member(event)
            case WorkerReport():
                self._on_report(event, now)
            case EventBatch() | IndexSnapshot():
                return self._on_blocks(event)
        return []

    def _on_member(self, change: MemberChange) -> None:
        member, live = change.member, change.liveness is Liveness.LIVE
        if member.role is not Role.STORE and member.role not in WORKER_ROLES:
            return
        self._board = None
        if live and member.layout is not None:
            self._block_tokens = member.layout.block_tokens
        if member.role is Role.STORE:
            self._on_store(member, live)
        else:
            self._on_worker(member, live)

    def _on_store(self, member: Member, live: bool) -> None:
        known = self._stores.get(member.node)
        if known is not None and member.incarnation < known.incarnation:
            return
        if not live or (known is not None and known.incarnation != member.incarnation):
            self._pool.drop(member.node)  # gone, or its blocks went with its last life; silent: a snapshot will tell
        if live:
            self._stores[member.node] = member
        else:
            self._stores.pop(member.node, None)

    def _on_worker(self, member: Member, live: bool) -> None:
        known = self._workers.get(member.id)
        if known is not None and member.incarnation < known.member.incarnation:
            return
        if live and known is not None and known.member.incarnation == member.incarnation:
            known.member = member
            return
        self._workers.pop(member.id, None)
        self._devices.drop(member.id)
        self._ledger.lose(member.id)
        if live:
            self._workers[member.id] = Worker(member)

    def _on_report(self, report: WorkerReport, now: float) -> None:
        worker = self._workers.get(report.worker)
        if worker is None or worker.member.incarnation != report.incarnation:
            self._counts["reports_ignored"] += 1
            return
        for prefill, step in ((worker.prefill, worker.step), self._of_role[worker.member.role]):
            for timing in report.prefills:
                prefill.add(timing)
            for measured in report.steps:
                step.add(measured)
        worker.take(report, self._block_tokens)
        fit, step_fit = self._fits(worker)
        if self._board is not None and report.worker in self._board.row:
            self._board.write_fits(worker, fit, step_fit)
        left = [(a.prompt_tokens, n) for a in report.attempts if (n := worker.prompt_left(a))]
        worker.busy_until = now + sum(seconds_of(fit, prompt, n) for prompt, n in left)
        for ended in self._ledger.report(report.worker, {(a.request, a.attempt) for a in report.attempts}, now):
            self._counts["bookings_ended_by_report"] += 1
            self._write(ended.prefill, ended.decode)
        self._write(report.worker)

    def _on_blocks(self, event: EventBatch | IndexSnapshot) -> list[Action]:
        tiers = {e.tier for e in event.events} if isinstance(event, EventBatch) else {tier for tier, _ in event.entries}
        device = Tier.G1 in tiers or (not tiers and event.holder in self._workers)
        index = self._devices if device else self._pool
        owner = self._worker_life(event.holder) if device else self._stores.get(NodeId(event.holder))
        if owner is None or owner.incarnation != event.incarnation:
            self._counts["events_ignored"] += 1
            return []
        bit = index.bit_number(event.holder)
        applied = index.load(event) if isinstance(event, IndexSnapshot) else index.apply(event)
        if applied is Applied.GAP:
            self._counts["event_gaps"] += 1
            if not device:
                return [Resync(NodeId(event.holder))]
            if isinstance(event, EventBatch):
                index.follow_from(event)
        if index.bit_number(event.holder) != bit and self._board is not None:
            self._write_bits(self._board)
        return []

    def next_number(self, node: NodeId, incarnation: Incarnation) -> int:
        """The number of the next event wanted from this life of a node's store; 0: a snapshot is wanted."""
        return self._pool.next_number(node, incarnation)

    def _worker_life(self, holder: str) -> Member | None:
        worker = self._workers.get(MemberId(holder))
        return None if worker is None else worker.member

    def finished(self, done: Finished, now: float) -> None:
        """An attempt is over, however it ended. Unknown and repeated ones change nothing."""
        self._expire(now)
        booking = self._ledger.bookings.get(done.request)
        if booking is not None and booking.attempt == done.attempt:
            self._ledger.release(done.request)
            self._write(booking.prefill, booking.decode)
        decisions = self._log.of(done.request)
        for decision in decisions:
            if decision.request.attempt == done.attempt and decision.actual is None:
                decision.actual = done
                self._learn(decision, done, first=decision is decisions[0])

    def _learn(self, decision: Decision, done: Finished, *, first: bool) -> None:
        option = decision.option
        if done.ttft_ms <= 0.0 or option is None or not isinstance(decision.outcome, Placement):
            return
        self._counts["cached_tokens_predicted"] += decision.cached_tokens
        self._counts["cached_tokens_actual"] += done.cached_tokens
        if first and option.ttft.sure and option.wait_s == 0.0:  # a later attempt's TTFT contains the earlier ones
            self._overhead.add(done.ttft_ms / 1e3 - (option.ttft.likely - decision.overhead_s))

    # -- placing -------------------------------------------------------------------------------------------------------

    def place(self, request: PlaceRequest, now: float) -> Placement | Refusal:
        """Books what it answers. The same request placed again (another attempt, a retried call) replaces its booking."""
        self._expire(now)
        board = self._fresh_board()
        record = Decision(replace(request, keys=()), len(request.keys), now)
        self._log.add(record)
        rows = usable(board, self._stores, request)
        if isinstance(rows, Refusal):
            record.outcome = rows
            self._counts["refusals_no_path"] += 1
            return rows
        prompt = Prompt(request.prompt_tokens, len(request.keys), self._block_tokens)
        held, deepest = self._held(request.keys, board, rows)
        prefill = score_prefill(board, rows.pooled, prompt, held, self._overhead.seconds, now)
        decode = score_decode(board, prompt)
        option = record.option = choose(board, request.targets, prompt, rows, prefill, decode)
        record.prefill = prefill_candidates(board, rows, prefill, option.prefill)
        record.decode = decode_candidates(board, rows, decode, option.decode)
        record.cached_tokens = int(prefill.cached[option.prefill])
        record.overhead_s = self._overhead.seconds
        if option.meets(request.targets):
            plan = self._plan(prompt, prefill, held, deepest, board, option)
            record.outcome = self._book(request, option, float(prefill.work[option.prefill]), plan, board, now)
        else:
            record.outcome = missed(option, request.targets, board)
            self._counts["refusals_targets_missed"] += 1
        return record.outcome

    def _held(self, keys: tuple[bytes, ...], board: Board, rows: Usable) -> tuple[Held, list[NodeId]]:
        """What is held where, and the nodes that hold the most, by name."""
        own = depths(self._devices.match(keys), self._devices.bits)[board.device_bit]
        runs = self._pool.match(keys)
        node = depths(runs, self._pool.bits)[board.node_bit]
        for depth, mask in reversed(runs):
            names = sorted(NodeId(name) for name in self._pool.names(mask) if name not in rows.barred)
            if names:
                return Held(own, node, depth), names
        return Held(own, node, 0), []

    def _plan(
        self, prompt: Prompt, scores: PrefillScores, held: Held, deepest: list[NodeId], board: Board, option: Option
    ) -> tuple[Segment, ...]:
        row = option.prefill
        own, local, far = (int(blocks) for blocks in scores.covered[:, row])
        plan = int(scores.plan[row])
        source = deepest[self._placements % len(deepest)] if deepest else None  # equal holders take turns
        return segments(prompt, own, local if plan else own, far if plan == 2 else 0, board.workers[row].member.node, source)

    def _book(
        self, request: PlaceRequest, option: Option, work_s: float, plan: tuple[Segment, ...], board: Board, now: float
    ) -> Placement:
        self._placements += 1
        prefill, decode = board.workers[option.prefill], board.workers[option.decode]
        booking = Booking(
            self._placements,
            request.request,
            request.attempt,
            prefill.member.id,
            decode.member.id,
            work_s,
            request.prompt_tokens,
            now,
            now + option.ttft.likely,
        )
        replaced = self._ledger.add(booking)
        if replaced is not None:
            self._write(replaced.prefill, replaced.decode)
        prefill.last_chosen = decode.last_chosen = self._placements
        self._write(prefill.member.id, decode.member.id)
        return Placement(
            prefill.ref,
            decode.ref,
            plan,
            option.ttft.likely * 1e3 if option.ttft.sure else 0.0,
            option.tbt.likely * 1e3 if option.tbt.sure else 0.0,
            booking.number,
        )

    def explain(self, request: str) -> dict[str, Any] | None:
        """Every recorded decision about ``request``, JSON-able; None where none is remembered."""
        return self._log.explain(request)

    # -- state ---------------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for old in self._ledger.expire(now):
            self._counts["bookings_expired"] += 1
            self._write(old.prefill, old.decode)

    def _fresh_board(self) -> Board:
        if self._board is None:
            ready = [worker for worker in self._workers.values() if worker.member.ready]
            self._board = Board(ready, {node: store for node, store in self._stores.items() if store.ready})
            self._write_bits(self._board)
            self._write(*self._board.row)
            for worker in ready:
                self._board.write_fits(worker, *self._fits(worker))
        return self._board

    def _write(self, *names: MemberId) -> None:
        """Bring the rows of these workers up to date; those not on the board are passed over."""
        if self._board is None:
            return
        for name in names:
            if name in self._board.row:
                worker = self._workers[name]
                self._board.write(worker, self._ledger.coming(name))

    def _fits(self, worker: Worker) -> tuple[Fit, Fit]:
        """Prefill and step time: the worker's own where it has measured enough, else its role's."""
        prefill, step = self._of_role[worker.member.role]
        return (
            worker.prefill.fit if worker.prefill.fit.sure else prefill.fit,
            worker.step.fit if worker.step.fit.sure else step.fit,
        )

    def _write_bits(self, board: Board) -> None:
        for row, worker in enumerate(board.workers):
            device = self._devices.bit_number(worker.member.id)
            node = self._pool.bit_number(worker.member.node)
            board.device_bit[row] = NO_BIT if device is None else device
            board.node_bit[row] = NO_BIT if node is None else node

    def numbers(self, now: float) -> dict[str, float]:
        """Gauges and counters. ``bookings`` and ``attempts_reported`` are 0 when the cluster is idle."""
        self._expire(now)
        coming = [self._ledger.coming(name) for name in self._workers]
        return {
            "bookings": float(len(self._ledger)),
            "booked_prefill_seconds": sum(c.prefill_s for c in coming),
            "booked_context_tokens": float(sum(c.context_tokens for c in coming)),
            "attempts_reported": float(sum(len(worker.attempts) for worker in self._workers.values())),
            "workers": float(len(self._workers)),
            "store_nodes": float(len(self._stores)),
            "blocks_indexed": float(len(self._pool)),
            "device_blocks_indexed": float(len(self._devices)),
            "decisions_recorded": float(len(self._log)),
            "placements": float(self._placements),
            "first_token_overhead_seconds": self._overhead.seconds,
            **{name: float(self._counts[name]) for name in COUNTERS},
        }
