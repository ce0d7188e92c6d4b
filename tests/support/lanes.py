"""An engine with two memories of each page, whose copies between them are made as late as they may be."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moonpool.engine.host_view import StagedView
from moonpool.engine.lanes import HostLanes, Mark
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.slice_packing import TorchPacking


@dataclass(eq=False)
class _Late:
    lane: LateLane
    done: bool = False

    def wait(self) -> None:
        self.lane.run_to(self)


@dataclass(eq=False)
class LateLane:
    """Does its work in order, and nothing of it before somebody waits for it."""

    waiting: deque[tuple[_Late, Callable[[], None], tuple[Mark, ...]]] = field(default_factory=deque)
    lock: threading.RLock = field(default_factory=threading.RLock)  # type: ignore[arg-type]

    def put(self, work: Callable[[], None], after: Sequence[Mark] = ()) -> Mark:
        with self.lock:
            mark = _Late(self)
            self.waiting.append((mark, work, tuple(after)))
            return mark

    def run_to(self, mark: _Late) -> None:
        with self.lock:
            while not mark.done:
                next_mark, work, after = self.waiting.popleft()
                for one in after:
                    one.wait()
                work()
                next_mark.done = True


def late_view(memory: PageTensor) -> StagedView:
    layout = memory.layout
    host = torch.zeros((memory.pages, layout.layers, layout.slice_bytes), dtype=torch.uint8)
    return StagedView(memory, TorchPacking(memory), HostLanes(LateLane(), LateLane()), host)


def coming_in(view: StagedView) -> int:
    """Copies to the device that nobody has waited for."""
    lane = view._lanes.inward
    assert isinstance(lane, LateLane)
    return len(lane.waiting)


def under_way(view: StagedView) -> int:
    """Copies to the host that nobody has waited for."""
    lane = view._lanes.outward
    assert isinstance(lane, LateLane)
    return len(lane.waiting)
