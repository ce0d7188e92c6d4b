"""The queue of requests that wait, against a list sorted anew every time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.policy import SPARE, Waiting
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
    outlook = queue.outlook(waiting("mine", len(works)), mine, np.array(busy), 0.0)
    assert outlook.wait_s == pytest.approx(min(free))
    assert not outlook.delayed


def test_a_more_urgent_class_waits_for_its_own_only() -> None:
    queue = WaitingQueue(10)
    queue.add(waiting("long", 1, work_s=9.0), 9.0)
    assert queue.outlook(waiting("urgent", 2, priority=1), 50.0, np.zeros(1), 0.0).wait_s == 0.0
    assert queue.outlook(waiting("other", 3), 50.0, np.zeros(1), 0.0).wait_s == 9.0


def test_nobody_to_wait_for_is_no_wait() -> None:
    assert WaitingQueue(1).outlook(waiting("a", 1), 0.0, np.zeros(0), 0.0).wait_s == 0.0


def promised(name: str, order: int, *, arrived: float = 0.0, work_s: float = 1.0, target_s: float = 10.0) -> Waiting:
    return Waiting(PlaceRequest(name, 1, (), 10, 10), arrived, order, work_s, work_s, target_s)


def test_who_would_miss_its_target_goes_before_shorter_prompts_in_time() -> None:
    queue = WaitingQueue(10)
    queue.add(promised("long", 1, work_s=4.0), 4.0)
    queue.add(waiting("short", 2, work_s=0.5), 0.5)
    due = (1.0 - SPARE) * 10.0 - 4.0
    assert [w.request.request for i in range(2) if (w := queue.nth(i, due - 1.0))] == ["short", "long"]
    assert [w.request.request for i in range(2) if (w := queue.nth(i, due - 0.4))] == ["long", "short"]
    assert queue.next_due(0.0) == pytest.approx(due)
    assert not queue.is_pressing(promised("long", 1), due - 0.1)
    assert queue.is_pressing(promised("long", 1), due)


def test_a_shorter_prompt_hears_whom_it_would_delay_and_that_it_would_not_at_the_end() -> None:
    queue = WaitingQueue(10)
    for i in range(3):
        queue.add(promised(f"long-{i}", i, work_s=3.0, target_s=10.0), 3.0 + i)
    first = queue.outlook(promised("short", 9, work_s=1.0), 1.0, np.zeros(1), 0.0)
    assert first.wait_s == 0.0
    assert [(one.request.request, ttft) for one, ttft in first.delayed] == [
        ("long-0", pytest.approx(4.0)),
        ("long-1", pytest.approx(7.0)),
        ("long-2", pytest.approx(10.0)),
    ]
    assert first.pressed == pytest.approx(1.0)
    last = queue.outlook(promised("short", 9, work_s=1.0, target_s=20.0), float("inf"), np.zeros(1), 0.0)
    assert (last.wait_s, last.delayed, last.pressed) == (pytest.approx(9.0), (), 0.0)


def test_who_misses_its_target_anyway_keeps_nobody_out() -> None:
    queue = WaitingQueue(10)
    queue.add(promised("hopeless", 1, work_s=5.0, target_s=2.0), 5.0)
    assert not queue.outlook(promised("short", 2, work_s=0.1), 0.1, np.full(1, 3.0), 0.0).delayed


@given(
    jobs=st.lists(st.tuples(st.floats(0.1, 4.0), st.none() | st.floats(1.0, 30.0)), min_size=1, max_size=12),
    busy=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=3),
)
def test_a_forecast_with_targets_begins_everybody_once_and_no_two_at_a_time(
    jobs: list[tuple[float, float | None]], busy: list[float]
) -> None:
    queue = WaitingQueue(100)
    for i, (work, target) in enumerate(jobs[1:], 1):
        queue.add(Waiting(PlaceRequest(f"r{i}", 1, (), 10, 10), 0.0, i, work, work, target), work)
    mine = Waiting(PlaceRequest("mine", 1, (), 10, 10), 0.0, 0, jobs[0][0], jobs[0][0], 5.0)
    outlook = queue.outlook(mine, jobs[0][0], np.array(busy), 0.0)
    assert min(busy) <= outlook.wait_s <= max(busy) + sum(work for work, _ in jobs)
    assert all(ttft >= one.alone_s for one, ttft in outlook.delayed)
