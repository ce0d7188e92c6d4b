"""The lanes of a GPU, with streams and events that write down what they are asked: what waits for what, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moonpool.engine.lanes import CudaLanes

Told = list[str]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    written: Told = []
    names = iter(["compute", "outward", "inward"])

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.name = next(names)

        def wait_event(self, event: Event) -> None:
            written.append(f"{self.name} waits for {event.of}")

    class Event:
        of = "nothing"

        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            self.of = stream.name
            written.append(f"event of {self.of}")

        def synchronize(self) -> None:
            written.append(f"thread waits for {self.of}")

    @contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        written.append(f"in {stream.name}")
        yield
        written.append(f"out of {stream.name}")

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        yield

    compute = Stream(torch.device("cuda", 0))
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": inside,
        "default_stream": lambda device: compute,
        "device": on,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return written


def test_work_of_a_lane_begins_behind_what_it_is_to_follow_and_is_marked_there(told: Told) -> None:
    lanes = CudaLanes(torch.device("cuda", 0))
    computed = lanes.computed()
    mark = lanes.outward.put(lambda: told.append("copy"), (computed,))
    assert told == [
        "event of compute",
        "in outward",
        "outward waits for compute",
        "copy",
        "event of outward",
        "out of outward",
    ]
    del told[:]
    mark.wait()
    lanes.hold(lanes.inward.put(lambda: told.append("bring")))
    assert told == [
        "thread waits for outward",
        "in inward",
        "bring",
        "event of inward",
        "out of inward",
        "compute waits for inward",
    ]
