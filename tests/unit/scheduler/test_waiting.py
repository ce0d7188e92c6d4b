"""The queue of requests that wait, against a list sorted anew every time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.policy import Waiting
from moonpool.scheduler.waiting import WaitingQueue

CAP_S = 10.0


def waiting(name: str, order: int, *, arrived: float = 0.0, work_s: float = 1.0, priority: int = 0) -> Waiting:
    return Waiting(PlaceRequest(name, 1, (), 10, 10, priority=priority), arrived, order, work_s)


@dataclass
class SortedList:
    entries: list[tuple[Waiting, float]] = field(default_factory=list)

    def order(self, now: float) -> list[Waiting]:
        late = [w for w, _ in self.entries if now - w.arrived >= CAP_S]
        rest = [(-w.request.priority, key, w.order, w) for w, key in self.entries if w not in late]
        return sorted(late, key=lambda w: w.order) + [entry[3] for entry in sorted(rest, key=lambda entry: entry[:3])]


class QueueAgainstList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue(1_000, CAP_S)
        self.plain = SortedList()
        self.now, self.count = 0.0, 0

    @rule(after=st.sampled_from([0.0, 0.5, 4.0]), key=st.sampled_from([0.0, 1.0, 1.5, -2.0]), priority=st.integers(-1, 1))
    def arrives(self, after: float, key: float, priority: int) -> None:
        self.now += after
        self.count += 1
        new = waiting(f"r{self.count}", self.count, arrived=self.now, priority=priority)
        self.queue.add(new, key)
        self.plain.entries.append((new, key))

    @precondition(lambda self: self.plain.entries)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.plain.entries))
        self.plain.entries.remove(entry)
        assert self.queue.remove(entry[0].request.request)
        assert not self.queue.remove(entry[0].request.request)

    @invariant()
    def same_order(self) -> None:
        expected = self.plain.order(self.now)
        assert [self.queue.nth(i, self.now) for i in range(len(expected) + 1)] == [*expected, None]
        assert len(self.queue) == len(expected)


TestQueueAgainstList = QueueAgainstList.TestCase


def test_asking_again_replaces_the_place_in_the_queue() -> None:
    queue = WaitingQueue(10)
    queue.add(waiting("a", 1), 5.0)
    queue.add(waiting("b", 2), 1.0)
    queue.add(waiting("a", 3), 0.0)
    assert [w.order for i in range(2) if (w := queue.nth(i, 0.0))] == [3, 2]
    assert queue.nth(2, 0.0) is None


def test_a_full_queue_says_so() -> None:
    queue = WaitingQueue(2)
    for i in range(2):
        assert not queue.full
        queue.add(waiting(f"r{i}", i), float(i))
    assert queue.full


@given(
    works=st.lists(st.floats(0.01, 5.0), max_size=12),
    busy=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4),
    mine=st.floats(0.0, 6.0),
)
def test_the_forecast_of_a_wait_is_what_serving_in_order_takes(works: list[float], busy: list[float], mine: float) -> None:
    queue = WaitingQueue(100)
    for i, work in enumerate(works):
        queue.add(waiting(f"r{i}", i, work_s=work), work)
    free = list(busy)
    for work in sorted(works):
        if work <= mine:
            free[free.index(min(free))] += work
    assert queue.wait_s(waiting("mine", len(works)), mine, np.array(busy)) == pytest.approx(min(free))


def test_a_more_urgent_class_waits_for_its_own_only() -> None:
    queue = WaitingQueue(10)
    queue.add(waiting("long", 1, work_s=9.0), 9.0)
    assert queue.wait_s(waiting("urgent", 2, priority=1), 50.0, np.zeros(1)) == 0.0
    assert queue.wait_s(waiting("other", 3), 50.0, np.zeros(1)) == 9.0


def test_nobody_to_wait_for_is_no_wait() -> None:
    assert WaitingQueue(1).wait_s(waiting("a", 1), 0.0, np.zeros(0)) == 0.0
