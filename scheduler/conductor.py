"""The conductor: events and ``now`` in, placements and actions out. Pure: no clock, no thread, no socket.

All it knows is rebuilt from the others' messages, so any number of conductors may run and any of them may die. ``now``
is one monotonic clock in seconds. A policy chooses, an admission lets in or refuses, the view books; each decision is
recorded. A policy that binds late keeps requests here, in one queue, until a prefill worker is about to be free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moonpool.core.errors import Reason
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.hits import hit_quantum
from moonpool.core.hits import usable as usable_blocks
from moonpool.core.ids import Incarnation, NodeId, Role
from moonpool.core.membership import Liveness, MemberChange, WorkerReport
from moonpool.core.placement import Finished, Later, Placement, PlaceRequest, Refusal
from moonpool.scheduler.actions import Action, Resync, SwitchRole
from moonpool.scheduler.admission.certain import Certain
from moonpool.scheduler.admission.policy import Admission, Judging
from moonpool.scheduler.board import Board, Usable
from moonpool.scheduler.candidates import usable
from moonpool.scheduler.choice import Considered, Option, choice_of, predict
from moonpool.scheduler.costs import Held, Prompt, depths
from moonpool.scheduler.decisions import Decision, DecisionLog, decode_candidates, prefill_candidates
from moonpool.scheduler.estimates import Overhead, Seeds
from moonpool.scheduler.late_binding import FULL_RETRY_S, Desk, LateBinding
from moonpool.scheduler.links import Links
from moonpool.scheduler.placing import booking_of, flow_names, flows_of, placement_of
from moonpool.scheduler.planner import Planner, Proposal
from moonpool.scheduler.policies.pooled_min_ttft import PooledMinTtft
from moonpool.scheduler.policy import Asked, Choice, Policy, Waiting
from moonpool.scheduler.prefill_queue import Rule
from moonpool.scheduler.view import View

COUNTERS = (
    "refusals_no_path",
    "refusals_targets_missed",
    "refusals_overloaded",
    "admitted_to_measure",
    "prefill_groups",
    "prefill_helpers",
    "bookings_expired",
    "bookings_ended_by_report",
    "reports_ignored",
    "events_ignored",
    "event_gaps",
    "cached_tokens_predicted",
    "cached_tokens_actual",
    "cached_tokens_mispredicted",
    "ttft_predicted",
    "ttft_above_prediction",
)
MAX_WAITING = 10_000
STALE_S = 30.0  # what was learned in a slow minute would else refuse everybody for ever, and nothing be measured anew

Event = MemberChange | EventBatch | IndexSnapshot | WorkerReport


class Conductor:
    def __init__(
        self,
        *,
        policy: Policy | None = None,
        admission: Admission | None = None,
        booking_s: float = 120.0,
        log_limit: int = 10_000,
        max_waiting: int = MAX_WAITING,
        planner: Planner | None = None,
        rule: Rule | None = None,
        seeds: Seeds | None = None,
        min_hit_tokens: int = 0,
    ) -> None:
        """``booking_s``: total budget of a request, after which nothing of it can be alive. ``planner``: switches roles.
        ``rule``: the order of prefill workers' own queues; None: that of arrival. ``seeds``: what prefills and steps take
        before any was measured. ``min_hit_tokens``: of cached prefixes only multiples of so many are used."""
        self._min_hit_tokens = min_hit_tokens
        self.policy: Policy = policy or PooledMinTtft()
        self.admission: Admission = admission or Certain()
        self.links = Links()
        self.planner = planner
        self._view = View(booking_s, rule, seeds)
        self._log = DecisionLog(log_limit)
        self._overhead = Overhead()
        desk = Desk(lambda: self._view.board, self._ask, self._judge, self._place, self._refuse, self._open, self._act)
        self._late = LateBinding(desk, self.policy, max_waiting)
        self._queue = self._late.queue
        self._measured_at = float("-inf")
        self._more_at: float | None = None
        self._judging = self.admission if isinstance(self.admission, Judging) else None
        self._out: list[Action] = []
        self._placements = 0
        self._asked = 0

    # -- what happens elsewhere ----------------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> list[Action]:
        view = self._view
        view.expire(now)
        self._sweep(now)
        match event:
            case MemberChange():
                view.on_member(event)
                if event.member.role is Role.STORE and event.liveness is Liveness.GONE:
                    self.links.forget(event.member.node)
            case WorkerReport():
                view.on_report(event, now)
                if event.prefills or event.steps:
                    self._measured_at = now
                for timing in event.links:
                    self.links.measured(timing, now)
            case EventBatch() | IndexSnapshot():
                if not view.on_blocks(event):
                    self._out.append(Resync(NodeId(event.holder)))
                if isinstance(event, IndexSnapshot):
                    self._sweep(now)
                return self.take_actions()
        self._late.bind(now)
        return self.take_actions()

    def finished(self, done: Finished, now: float) -> list[Action]:
        """An attempt is over, however it ended. Unknown and repeated ones change nothing."""
        self._view.expire(now)
        self._view.release(done.request, done.attempt)
        self._end_flows(done.request)
        self.admission.finished(done, now)
        if self.planner is not None and done.outcome == "ok":
            self.planner.finished(done.output_tokens)
        decisions = self._log.of(done.request)
        for decision in decisions:
            if decision.request.attempt == done.attempt and decision.actual is None:
                decision.actual = done
                self._view.courses.learn(decision.request, done)
                self._learn(decision, done, first=decision is decisions[0])
        self._late.bind(now)
        return self.take_actions()

    def due(self, now: float) -> list[Action]:
        """To be called at ``next_at``; earlier or more often does no harm."""
        self._view.expire(now)
        self._sweep(now)
        self._late.bind(now)
        if self.planner is not None:
            self._out += self.planner.due(self._view.board, now)
        return self.take_actions()

    def _sweep(self, now: float) -> None:
        self._more_at = now if self._view.sweep() else None

    def next_at(self) -> float | None:
        """When a prefill worker is about to be free for somebody who waits, the planner wants to look, or more of a snapshot
        is to be taken in (at once); None: none of these."""
        looks_at = None if self.planner is None else self.planner.next_at()
        times = [at for at in (looks_at, self._more_at, *self._late.due_at()) if at is not None]
        return min(times, default=None)

    def rebalance(self, now: float, *, patient: bool = True) -> Proposal | None:
        """What the planner would do now, with its reasons; None without one."""
        return None if self.planner is None else self.planner.propose(self._view.board, now, patient=patient)

    def switching(self, switch: SwitchRole, now: float) -> None:
        """Somebody else had a worker begin to switch."""
        if self.planner is not None:
            self.planner.began(switch, now)

    def take_actions(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def next_number(self, node: NodeId, incarnation: Incarnation) -> int:
        """The number of the next event wanted from this life of a node's store; 0: a snapshot is wanted."""
        return self._view.pool.next_number(node, incarnation)

    # -- placing -------------------------------------------------------------------------------------------------------

    def place(self, request: PlaceRequest, now: float) -> Placement | Refusal | Later:
        """Books what it answers. An earlier booking of the same request (another attempt, a retried call) ends."""
        self._view.expire(now)
        self._view.release(request.request)
        self._queue.remove(request.request)
        self._asked += 1
        record = self._record(request, now)
        asked = self._ask(request, now)
        self._log.add(record)
        if isinstance(asked, Refusal):
            record.outcome = self._refused(asked)
            return asked
        answer = self._answer(asked, record)
        if self.planner is not None and request.attempt <= 1:
            option = record.option
            work_s = float(asked.scores.work.min()) if option is None else option.work_s
            self.planner.arrived(request, request.prompt_tokens - record.cached_tokens, work_s, now)
        return answer

    def _answer(self, asked: Asked, record: Decision) -> Placement | Refusal | Later:
        choice = self.policy.choose(asked)
        if choice is None:
            refusal = Refusal(Reason.NO_PATH, f"policy {self.policy.name} found no worker for the request", FULL_RETRY_S)
            record.outcome = self._refused(refusal)
            return refusal
        if self._late.waits(asked, choice):
            return self._late.join(asked, choice, record, self._asked)
        option = predict(asked, choice)
        return self._judge(asked, option, record) or self._booked(asked, choice, option, record)

    def consider(self, request: PlaceRequest, policy: Policy, now: float) -> Considered | None:
        """What ``policy`` would choose now, and what is to be expected of it. Nothing changes. None: it finds nobody."""
        self._view.expire(now)
        asked = self._ask(request, now)
        choice = None if isinstance(asked, Refusal) else policy.choose(asked)
        return None if choice is None or isinstance(asked, Refusal) else _considered(asked, choice)

    def assume(self, request: PlaceRequest, placed: Placement, now: float) -> Considered | None:
        """Book what another conductor decided, as far as its workers are known here; what was to be expected of it."""
        self._view.expire(now)
        self._view.release(request.request)
        asked = self._ask(request, now)
        if isinstance(asked, Refusal):
            return None
        choice = choice_of(placed, asked)
        if choice is None:
            return None
        found = _considered(asked, choice)
        self._book(asked, found.option)
        return found

    def withdraw(self, request: str, now: float) -> None:
        """Nobody waits for the answer to ``request`` any more."""
        self._queue.remove(request)
        self._view.release(request)
        self._end_flows(request)

    def prefilled(self, request: str, now: float) -> Refusal | None:
        """The prompt of ``request`` is computed and about to join its batch: the admission's last word."""
        booking = self._view.booking(request)
        decisions = self._log.of(request)
        if booking is None or not decisions or decisions[-1].option is None:
            return None
        asked = self._ask(decisions[-1].request, now)
        row = None if isinstance(asked, Refusal) else asked.board.row.get(booking.decode)
        if isinstance(asked, Refusal) or row is None:
            return None
        prefill = asked.board.row.get(booking.prefill, row)  # it may have left meanwhile: its share is done
        option = predict(asked, Choice(prefill, row, 0), 0.0)
        refusal = self.admission.recheck(asked, option)
        if refusal is not None:
            self._view.release(request)
            decisions[-1].outcome = self._refused(refusal)
        return refusal

    def _ask(self, request: PlaceRequest, now: float) -> Asked | Refusal:
        board = self._view.board
        self.links.advance(now)
        rows = usable(board, self._view.stores, request)
        if isinstance(rows, Refusal):
            return rows
        prompt = Prompt(request.prompt_tokens, len(request.keys), self._view.block_tokens)
        quantum = hit_quantum(self._min_hit_tokens, self._view.block_tokens)
        held = self._held(request.keys, board, rows, quantum)
        soon, sharing = self._view.alike(request.keys, held.anywhere)
        if quantum > 1:
            soon = tuple(replace(one, blocks=usable_blocks(one.blocks, quantum)) for one in soon)
        seconds, pool = self._overhead.seconds, self._view.pool
        queued = self._queue.backlog(request.tenant)
        asked = Asked(request, prompt, rows, board, held, self.links, now, self._asked, seconds, soon, sharing, pool, *queued)
        asked.others = len(self._queue)  # of an arrival; of one that waited, late binding knows better
        return asked

    def _held(self, keys: tuple[bytes, ...], board: Board, rows: Usable, quantum: int) -> Held:
        devices, pool = self._view.devices, self._view.pool
        own = depths(devices.match(keys), devices.bits)[board.device_bit]
        runs = pool.match(keys)
        node = depths(runs, pool.bits)[board.node_bit]
        if quantum > 1:
            own, node = own - own % quantum, node - node % quantum
        for depth, mask in reversed(runs):
            names = tuple(sorted(NodeId(name) for name in pool.names(mask) if name not in rows.barred))
            if names and usable_blocks(depth, quantum):
                return Held(own, node, usable_blocks(depth, quantum), names)
        return Held(own, node, 0)

    def _place(self, asked: Asked, choice: Choice, record: Decision) -> Placement:
        option = predict(asked, choice)
        self._note(asked, record, option)
        return self._booked(asked, choice, option, record)

    def _booked(self, asked: Asked, choice: Choice, option: Option, record: Decision) -> Placement:
        record.outcome = placement = self._book(asked, option)
        self._out += self.policy.follow_up(asked, choice)
        return placement

    def _judge(self, asked: Asked, option: Option, record: Decision) -> Refusal | None:
        self._note(asked, record, option)
        refused = self._admit(asked, option, record)
        return None if refused is None else self._refuse(record, refused)

    def _admit(self, asked: Asked, option: Option, record: Decision) -> Refusal | None:
        """An idle cluster that measured nothing for a while lets in whom it would refuse, to measure again."""
        refused = self.admission.admit(asked, option)
        if self._judging is not None:
            record.judged = self._judging.judged
        if refused is None or asked.now - self._measured_at <= STALE_S or len(self._queue) or not self._view.idle:
            return refused
        self._measured_at = asked.now
        self._view.counts["admitted_to_measure"] += 1
        return None

    def _note(self, asked: Asked, record: Decision, option: Option) -> None:
        record.option = option
        record.prefill = prefill_candidates(asked, option.prefill)
        record.decode = decode_candidates(asked, option.decode)
        record.cached_tokens = option.cached_tokens
        record.waited_s = asked.now - record.at
        record.deepest, record.holders, record.flows = asked.held.anywhere, asked.held.holders, len(asked.links)

    def _record(self, request: PlaceRequest, at: float) -> Decision:
        short = replace(request, keys=())
        names = self.policy.name, self.admission.name
        return Decision(short, len(request.keys), at, *names, overhead_s=self._overhead.seconds)

    def _book(self, asked: Asked, option: Option) -> Placement:
        self._placements += 1
        self._view.counts["prefill_groups"] += bool(option.group)
        self._view.counts["prefill_helpers"] += max(len(option.group) - 1, 0)
        self._view.book(booking_of(asked, option, self._placements, self._view.courses.kind(asked.request)))
        self._queue.served(asked.request, option.work_s)
        self._end_flows(asked.request.request)
        for flow in flows_of(asked, option):
            self.links.begin(*flow)
        return placement_of(asked, option, self._placements)

    def _end_flows(self, request: str) -> None:
        for name in flow_names(request):
            self.links.end(name)

    def _act(self, action: Action) -> None:
        self._out.append(action)

    def _refuse(self, record: Decision, refusal: Refusal) -> Refusal:
        record.outcome = self._refused(refusal)
        return refusal

    def _refused(self, refusal: Refusal) -> Refusal:
        self._view.counts[f"refusals_{refusal.reason.value}"] += 1
        return refusal

    def _open(self, waiting: Waiting) -> Decision:
        """The record begun when ``waiting`` arrived; a new one where the log has forgotten it."""
        for decision in reversed(self._log.of(waiting.request.request)):
            if decision.request.attempt == waiting.request.attempt and decision.outcome is None:
                return decision
        record = self._record(waiting.request, waiting.arrived)
        self._log.add(record)
        return record

    # -- what it tells -------------------------------------------------------------------------------------------------

    def _learn(self, decision: Decision, done: Finished, *, first: bool) -> None:
        option = decision.option
        if done.ttft_ms <= 0.0 or option is None or not isinstance(decision.outcome, Placement):
            return
        self._view.counts["cached_tokens_predicted"] += decision.cached_tokens
        self._view.counts["cached_tokens_actual"] += done.cached_tokens
        if abs(decision.cached_tokens - done.cached_tokens) >= self._view.block_tokens:
            self._view.counts["cached_tokens_mispredicted"] += 1
        if first and option.ttft.sure:
            self._view.counts["ttft_predicted"] += 1
            if done.ttft_ms / 1e3 - decision.waited_s > option.ttft.high:
                self._view.counts["ttft_above_prediction"] += 1
        if first and option.ttft.sure and option.wait_s == 0.0:  # a later attempt's TTFT contains the earlier ones
            self._overhead.add(done.ttft_ms / 1e3 - decision.waited_s - (option.ttft.likely - decision.overhead_s))

    def explain(self, request: str) -> dict[str, Any] | None:
        """Every recorded decision about ``request``, JSON-able; None where none is remembered."""
        return self._log.explain(request)

    def newest(self, count: int) -> list[dict[str, Any]]:
        """The newest decisions, the oldest of them first, JSON-able."""
        return [{"request": one.request.request, **one.told()} for one in self._log.newest(count)]

    def numbers(self, now: float) -> dict[str, float]:
        """Gauges and counters. ``bookings``, ``waiting`` and ``attempts_reported`` are 0 when the cluster is idle."""
        self._view.expire(now)
        return {
            **self._view.numbers(),
            "waiting": float(len(self._queue)),
            "decisions_recorded": float(len(self._log)),
            "placements": float(self._placements),
            "first_token_overhead_seconds": self._overhead.seconds,
            **{name: float(self._view.counts[name]) for name in COUNTERS},
        }


def _considered(asked: Asked, choice: Choice) -> Considered:
    workers = asked.board.workers
    return Considered(workers[choice.prefill].ref.id, workers[choice.decode].ref.id, choice.until, predict(asked, choice))
