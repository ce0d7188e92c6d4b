"""Late binding: requests wait in the conductor until a prefill worker is about to be free, and go to it in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from moonpool.core.errors import Reason
from moonpool.core.placement import Later, Placement, PlaceRequest, Refusal
from moonpool.scheduler.actions import Action, Bound
from moonpool.scheduler.board import Board, Bools, Usable
from moonpool.scheduler.choice import Option, predict
from moonpool.scheduler.decisions import Decision
from moonpool.scheduler.fair_queue import FairQueue
from moonpool.scheduler.policy import OVERTAKEN, Asked, Choice, Policy, Waiting, bound_from

MAX_PASSED = 16  # who are better off waiting for a busy worker, before a free one is left without work for now
FULL_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Desk:
    """What the conductor does about one request; late binding says when."""

    board: Callable[[], Board]
    ask: Callable[[PlaceRequest, float], Asked | Refusal]
    judge: Callable[[Asked, Option, Decision], Refusal | None]  # the admission's word, noted in the record
    book: Callable[[Asked, Choice, Decision], Placement | Refusal]
    refuse: Callable[[Decision, Refusal], Refusal]
    record: Callable[[Waiting], Decision]  # the one begun when it arrived
    act: Callable[[Action], None]


class LateBinding:
    def __init__(self, desk: Desk, policy: Policy, max_waiting: int) -> None:
        self.queue = FairQueue(max_waiting, policy.wait_cap_s)
        self._desk = desk
        self._policy = policy
        self._bound_at = 0.0
        self._settled_at = 0.0  # when somebody who waits to see whether more comes has seen it

    def due_at(self) -> Iterator[float]:
        """When somebody who waits may be bound: a worker is about to be free, or one may not be passed over any more."""
        if not len(self.queue):
            return
        board = self._desk.board()
        since = bound_from(self._policy, board)
        rows = (board.split | board.both) & (since > self._bound_at)  # whoever was free before that was not wanted
        if rows.any():
            yield float(since[rows].min())
        if (due := self.queue.next_due(self._bound_at)) is not None:
            yield due
        if self._settled_at > self._bound_at:
            yield self._settled_at

    def waits(self, asked: Asked, choice: Choice) -> bool:
        """Whether ``choice`` is better taken later."""
        return self._policy.late and (choice.hold or not self._free(asked, choice.lead))

    def join(self, asked: Asked, choice: Choice, record: Decision, order: int) -> Later | Refusal:
        """Take ``asked`` into the queue, or refuse it. ``order``: of arrival."""
        displaced = self.queue.displaced_by(asked.request) if self.queue.full else None
        if self.queue.full and displaced is None:
            return self._desk.refuse(record, self._too_many())
        waiting = _waiting(asked, choice, order)
        key = self._policy.key(waiting)
        busy = np.maximum(asked.board.busy_until - asked.now, 0.0)
        outlook = self.queue.outlook(waiting, key, busy[asked.usable.prefills], asked.now)
        if outlook.pressed > OVERTAKEN:  # it may still go behind those that it would press
            last = self.queue.outlook(waiting, float("inf"), busy[asked.usable.prefills], asked.now)
            if last.pressed < outlook.pressed:
                key, outlook = float("inf"), last
        option = predict(asked, choice, max(float(busy[choice.lead]), outlook.wait_s))
        asked.delayed = outlook.delayed
        if (refused := self._desk.judge(asked, option, record)) is not None:
            return refused
        if displaced is not None:
            self._displace(displaced)
        self.queue.add(waiting, key)
        self._settle(asked, choice)
        for action in self._policy.ahead(asked, choice):
            self._desk.act(action)
        return Later(asked.request.request, asked.request.attempt, option.ttft.likely * 1e3 if option.ttft.sure else 0.0)

    def bind(self, now: float) -> None:
        """Give prefill workers that are about to be free to those who wait, in order."""
        self._bound_at = now
        passed = 0  # those who had better wait on: they keep their places
        while passed < MAX_PASSED and (waiting := self.queue.nth(passed, now)) is not None and self._anybody_free(now):
            answer = self._answer(waiting, now, passed)
            if answer is None:
                passed += 1
            else:
                self._leave(waiting, answer)

    def _answer(self, waiting: Waiting, now: float, before: int) -> Placement | Refusal | None:
        """``before``: so many go before it and wait on. None: the worker it had better run on is busy, or it is held back."""
        asked = self._desk.ask(waiting.request, now)
        if isinstance(asked, Refusal):
            return self._desk.refuse(self._desk.record(waiting), asked)
        asked.waited_s, asked.others = now - waiting.arrived, before
        if pressing := self.queue.is_pressing(waiting, now):
            asked.usable = _only(asked.usable, bound_from(self._policy, asked.board) <= now)
        choice = self._policy.choose(asked) if asked.usable.prefills.any() else None
        if choice is None or (choice.hold and not pressing) or not self._free(asked, choice.lead):
            self._settle(asked, choice)
            return None
        return self._desk.book(asked, choice, self._desk.record(waiting))

    def _settle(self, asked: Asked, choice: Choice | None) -> None:
        if choice is not None and choice.settle_s > 0.0:
            at = asked.now + choice.settle_s
            self._settled_at = at if self._settled_at <= asked.now else min(self._settled_at, at)

    def _leave(self, waiting: Waiting, answer: Placement | Refusal) -> None:
        self.queue.remove(waiting.request.request)
        self._desk.act(Bound(waiting.request.request, waiting.request.attempt, answer))

    def _too_many(self) -> Refusal:
        count = len(self.queue)
        return Refusal(Reason.OVERLOADED, f"{count} requests wait for a prefill worker, scheduler.max_waiting", FULL_RETRY_S)

    def _displace(self, waiting: Waiting) -> None:
        """Its tenant fills more of the queue than its share, and another one needs the place."""
        self._leave(waiting, self._desk.refuse(self._desk.record(waiting), self._too_many()))

    def _free(self, asked: Asked, row: int) -> bool:
        return bool(bound_from(self._policy, asked.board)[row] <= asked.now)

    def _anybody_free(self, now: float) -> bool:
        """Or no pair of workers is left, and those who wait are to hear it."""
        board = self._desk.board()
        if board.everybody is None:
            return True
        return bool(((board.split | board.both) & (bound_from(self._policy, board) <= now)).any())


def _waiting(asked: Asked, choice: Choice, order: int) -> Waiting:
    work = np.where(asked.usable.prefills, asked.scores.work, np.inf)
    alone, target_ms = predict(asked, choice, 0.0), asked.request.targets.ttft_ms
    target_s = target_ms / 1e3 if target_ms is not None and alone.ttft.sure else None
    return Waiting(asked.request, asked.now, order, float(work.min()), alone.ttft.likely, target_s)


def _only(rows: Usable, free: Bools) -> Usable:
    return replace(rows, split=rows.split & free, both=rows.both & free, prefills=rows.prefills & free)
