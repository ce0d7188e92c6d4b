"""Queues of work beside what computes: copies between an engine's device pages and its host view wait there for their turn.

On a GPU a lane is a stream, and nothing in it holds up the compute stream until that is told to wait. Where both memories are
a CPU's, work is done when it is put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a lane, or in what computes: behind everything that was put there before."""

    def wait(self) -> None:
        """Blocks this thread until all of that is done. Any number of times, from any thread."""


class Lane(Protocol):
    def put(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> Mark:
        """Do ``work`` behind all that was put here, and behind ``after``; returns at once. From any thread.

        What ``work`` raises while it is put comes out of here.
        """


class Lanes(Protocol):
    """Of one engine: one lane for each direction, beside what computes."""

    outward: Lane
    inward: Lane

    def computed(self) -> Mark:
        """Behind what was given to the device to compute so far."""

    def hold(self, mark: Mark) -> None:
        """What is given to the device to compute from now on waits for ``mark``. The thread need not."""

    def on_device(self) -> AbstractContextManager[object]:
        """Inside, this thread computes on the engine's device."""


class _Done:
    def wait(self) -> None:
        pass


class AtOnce:
    """A lane of the thread that puts."""

    def put(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> Mark:
        for mark in after:
            mark.wait()
        work()
        return _Done()


class HostLanes:
    """Of two memories of a CPU."""

    def __init__(self, outward: Lane | None = None, inward: Lane | None = None) -> None:
        self.outward, self.inward = outward or AtOnce(), inward or AtOnce()

    def computed(self) -> Mark:
        return _Done()

    def hold(self, mark: Mark) -> None:
        mark.wait()

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A thread that waits for it sleeps: cores are for gateways and store nodes, too.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class _Stream:
    """Memory that work allocates belongs to this stream, so that it may be let go while it is still in use there."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def put(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> Mark:
        with torch.cuda.stream(self._stream):
            for mark in after:
                _event_of(mark).hold(self._stream)
            work()
            return _Event(self._stream)


class CudaLanes:
    """Streams of one GPU. What computes is its default stream, whichever thread issues it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.outward: Lane = _Stream(device)
        self.inward: Lane = _Stream(device)

    def computed(self) -> Mark:
        with torch.cuda.device(self._device):
            return _Event(torch.cuda.default_stream(self._device))

    def hold(self, mark: Mark) -> None:
        _event_of(mark).hold(torch.cuda.default_stream(self._device))

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)


def _event_of(mark: Mark) -> _Event:
    assert isinstance(mark, _Event)
    return mark
