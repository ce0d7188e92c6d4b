"""What the conductor knows: members, who holds which block, reports and estimates, bookings. Soft state, rebuilt from
the others' messages; told by events and read as a ``Board``."""

from __future__ import annotations

from collections import Counter

from moonpool.core.events import EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import LiveAttempt, Liveness, Member, MemberChange, WorkerReport
from moonpool.scheduler.board import NO_BIT, Board, Worker, seconds_of
from moonpool.scheduler.bookings import Booking, Ledger
from moonpool.scheduler.costs import Soon, shared_blocks
from moonpool.scheduler.decode_courses import DecodeCourses
from moonpool.scheduler.estimates import Fit, Seeds
from moonpool.scheduler.learned import WORKER_ROLES, Learned
from moonpool.scheduler.prefill_queue import PrefillQueues, Rule, Waiting
from moonpool.scheduler.prefix_index import Applied, PrefixIndex

SWEPT_PER_EVENT = 2_000  # index entries: about a millisecond
LOADED_PER_EVENT = 8_000  # index entries of a snapshot: about two milliseconds
DEFAULT_BLOCK_TOKENS = 64  # until a member with a layout is known


class View:
    def __init__(self, booking_s: float, rule: Rule | None = None, seeds: Seeds | None = None) -> None:
        """``rule``: in which order prefill workers compute what waits there. ``seeds``: first guesses of the estimates."""
        self.workers: dict[MemberId, Worker] = {}
        self.stores: dict[NodeId, Member] = {}
        self.devices = PrefixIndex(Tier.G1)
        self.pool = PrefixIndex(Tier.G2)
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        self.counts: Counter[str] = Counter()
        self._ledger = Ledger(booking_s)
        self._queues = PrefillQueues(rule) if rule is not None and rule.shortest else None
        self._learned = Learned(seeds)
        self.courses = DecodeCourses(self._ledger.decoding, lambda name: self._learned.step(self.workers[name]).coefficients)
        self._board: Board | None = None  # None: membership changed since

    @property
    def board(self) -> Board:
        """Up to date; not to be kept beyond the next event."""
        if self._board is None:
            ready = [worker for worker in self.workers.values() if worker.member.ready]
            stores = {node: store for node, store in self.stores.items() if store.ready}
            self._board = Board(ready, stores, self._queues, self.courses)
            self._write_bits(self._board)
            for worker in ready:
                self._board.write(worker, self._ledger.coming(worker.member.id))
                self._board.write_fits(worker, *self._learned.fits(worker))
                self._write_queue(worker)
        return self._board

    # -- events --------------------------------------------------------------------------------------------------------

    def on_member(self, change: MemberChange) -> None:
        member, live = change.member, change.liveness is Liveness.LIVE
        if member.role is not Role.STORE and member.role not in WORKER_ROLES:
            return
        self._board = None
        if live and member.layout is not None:
            self.block_tokens = member.layout.block_tokens
        if member.role is Role.STORE:
            self._on_store(member, live)
        else:
            self._on_worker(member, live)

    def _on_store(self, member: Member, live: bool) -> None:
        known = self.stores.get(member.node)
        if known is not None and member.incarnation < known.incarnation:
            return
        if not live or (known is not None and known.incarnation != member.incarnation):
            self.pool.drop(member.node)  # gone, or its blocks went with its last life; silent: a snapshot will tell
        if live:
            self.stores[member.node] = member
        else:
            self.stores.pop(member.node, None)

    def _on_worker(self, member: Member, live: bool) -> None:
        known = self.workers.get(member.id)
        if known is not None and member.incarnation < known.member.incarnation:
            return
        if live and known is not None and known.member.incarnation == member.incarnation:
            known.member = member
            return
        if (lost := self.workers.pop(member.id, None)) is not None:
            self._learned.forget(lost, self.workers.values())
        if self._queues is not None:
            self._queues.forget(member.id)
        self.devices.drop(member.id)
        self.courses.forget(member.id)
        for booking in self._ledger.lose(member.id):
            self._ended(booking)
        if live:
            self.workers[member.id] = Worker(member)

    def on_report(self, report: WorkerReport, now: float) -> None:
        worker = self.workers.get(report.worker)
        if worker is None or worker.member.incarnation != report.incarnation:
            self.counts["reports_ignored"] += 1
            return
        self._learned.learn(worker, report)
        worker.take(report, self.block_tokens)
        fit, step_fit = self._learned.fits(worker)
        if self._board is not None:
            if report.worker in self._board.row:
                self._board.write_fits(worker, fit, step_fit)
            for other in self._learned.others(worker, self._board.workers):
                self._board.write_fits(other, *self._learned.fits(other))
        for ended in self._ledger.report(report.worker, {(a.request, a.attempt) for a in report.attempts}, now):
            self.counts["bookings_ended_by_report"] += 1
            self._ended(ended)
        waiting = [(a, n) for a in report.attempts if (n := worker.prompt_left(a))]
        reported_s = sum(seconds_of(fit, a.prompt_tokens, self._ledger.left(report.worker, a, n)) for a, n in waiting)
        worker.busy_until = now + reported_s + self._ledger.coming(report.worker).prefill_s
        if self._queues is not None:
            self._queue(worker, waiting, fit, now)
        if worker.member.role is not Role.PREFILL:
            self.courses.reported(report.worker, report.attempts, now)
        self._write(report.worker)

    def _queue(self, worker: Worker, jobs: list[tuple[LiveAttempt, int]], fit: Fit, now: float) -> None:
        """What of a report is being computed, and what waits and since when."""
        known = {waiting.name: waiting.arrived for waiting in worker.waiting}
        worker.waiting, worker.free_at = [], now
        for attempt, left in jobs:
            seconds = seconds_of(fit, attempt.prompt_tokens, self._ledger.left(worker.member.id, attempt, left))
            if attempt.running:
                worker.free_at = now + seconds
                continue
            booking = self._ledger.bookings.get(attempt.request)
            arrived = known.get(attempt.request, now) if booking is None else booking.placed_at
            worker.waiting.append(Waiting(attempt.request, seconds, arrived))

    def on_blocks(self, event: EventBatch | IndexSnapshot) -> bool:
        """False: events of a node's store are missing, a snapshot is needed."""
        tiers = {e.tier for e in event.events} if isinstance(event, EventBatch) else {tier for tier, _ in event.entries}
        device = Tier.G1 in tiers or (not tiers and event.holder in self.workers)
        index = self.devices if device else self.pool
        owner = self._worker_life(event.holder) if device else self.stores.get(NodeId(event.holder))
        if owner is None or owner.incarnation != event.incarnation:
            self.counts["events_ignored"] += 1
            return True
        bit = index.bit_number(event.holder)
        applied = index.load(event, LOADED_PER_EVENT) if isinstance(event, IndexSnapshot) else index.apply(event)
        if applied is Applied.GAP:
            self.counts["event_gaps"] += 1
            if not device:
                return False
            if isinstance(event, EventBatch):
                index.follow_from(event)
        if index.bit_number(event.holder) != bit and self._board is not None:
            self._write_bits(self._board)
        return True

    def sweep(self) -> bool:
        """A little of the work that big snapshots and dropped holders leave behind. Whether more of a snapshot is left."""
        more = False
        for index in (self.devices, self.pool):
            more |= index.load_more(LOADED_PER_EVENT)
            index.sweep(SWEPT_PER_EVENT)
        return more

    def _worker_life(self, holder: str) -> Member | None:
        worker = self.workers.get(MemberId(holder))
        return None if worker is None else worker.member

    # -- bookings ------------------------------------------------------------------------------------------------------

    def book(self, booking: Booking) -> None:
        for name in booking.workers:
            self.workers[name].last_chosen = booking.number
        for name, seconds in booking.still_coming():
            worker = self.workers[name]
            worker.busy_until = max(worker.busy_until, booking.placed_at) + seconds
        self._ledger.add(booking)
        self.courses.booked(booking)
        self._write(*booking.workers)

    def booking(self, request: str) -> Booking | None:
        return self._ledger.bookings.get(request)

    def alike(self, keys: tuple[bytes, ...], held: int) -> tuple[tuple[Soon, ...], int]:
        """Of the prompts being computed: those that share more than ``held`` leading blocks with ``keys``, and how many share
        at least so many."""
        soon, sharing = [], 0
        last, beyond = keys[held - 1] if held else b"", keys[held] if held < len(keys) else b""
        for booking in self._ledger.computing.values():
            theirs = booking.keys
            if held and (len(theirs) < held or theirs[held - 1] != last):
                continue
            sharing += 1
            row = self.board.row.get(booking.prefill)
            if row is not None and beyond and len(theirs) > held and theirs[held] == beyond:
                soon.append(Soon(row, shared_blocks(keys, theirs), booking.prefilled_at))
        return tuple(soon), sharing if held else 0

    def release(self, request: str, attempt: int | None = None) -> None:
        """The booking of ``request``, if it has one; of this attempt only, where one is given."""
        booking = self._ledger.bookings.get(request)
        if booking is not None and attempt in (None, booking.attempt):
            self._ledger.release(request)
            self._ended(booking)

    def expire(self, now: float) -> None:
        for old in self._ledger.expire(now):
            self.counts["bookings_expired"] += 1
            self._ended(old)

    def _ended(self, booking: Booking) -> None:
        for name, seconds in booking.still_coming():
            if name in self.workers:
                self.workers[name].busy_until -= seconds  # the worker's next report puts it right
        self._write(*booking.workers)

    # -- the board's rows ----------------------------------------------------------------------------------------------

    def _write(self, *names: MemberId) -> None:
        """Bring the rows of these workers up to date; those not on the board are passed over."""
        for name in names:
            if self._board is not None and name in self._board.row:
                self._board.write(self.workers[name], self._ledger.coming(name))
                self._write_queue(self.workers[name])

    def _write_queue(self, worker: Worker) -> None:
        name = worker.member.id
        if self._queues is None:
            return
        if worker.member.role is Role.PREFILL:
            self._queues.write(name, [*worker.waiting, *self._ledger.waiting(name)], worker.free_at)
        else:
            self._queues.write(name, [], worker.busy_until)

    def _write_bits(self, board: Board) -> None:
        for row, worker in enumerate(board.workers):
            device = self.devices.bit_number(worker.member.id)
            node = self.pool.bit_number(worker.member.node)
            board.device_bit[row] = NO_BIT if device is None else device
            board.node_bit[row] = NO_BIT if node is None else node

    @property
    def idle(self) -> bool:
        """Nothing is booked and no worker reports anything."""
        return not len(self._ledger) and not any(worker.attempts for worker in self.workers.values())

    def numbers(self) -> dict[str, float]:
        coming = [self._ledger.coming(name) for name in self.workers]
        return {
            "bookings": float(len(self._ledger)),
            "booked_prefill_seconds": sum(c.prefill_s for c in coming),
            "booked_context_tokens": float(sum(c.context_tokens for c in coming)),
            "attempts_reported": float(sum(len(worker.attempts) for worker in self.workers.values())),
            "workers": float(len(self.workers)),
            "store_nodes": float(len(self.stores)),
            "blocks_indexed": float(len(self.pool)),
            "device_blocks_indexed": float(len(self.devices)),
        }
