"""How long a device takes for what it is given, without what Python takes to give it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch


class DeviceClock:
    """Best of ``rounds``. On a CPU, what is called is over when it returns."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._on_gpu = device.type == "cuda"

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of one of ``calls``: all are made one after the other, as one graph."""
        for call in calls:  # compiles kernels and measures their tiles
            call()
        return self.alone(self._captured(calls)) / len(calls)

    def alone(self, call: Callable[[], object]) -> float:
        """Of ``call`` as it is: what it does on the host while the device waits counts, too."""
        call()
        return min(self._timed(call) for _ in range(self._rounds))

    def waited(self, call: Callable[[], object]) -> float:
        """Of work on any stream that ``call`` waits for."""
        taken = []
        for _ in range(self._rounds + 1):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        return min(taken[1:])

    def _captured(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        if not self._on_gpu:
            return lambda: [call() for call in calls]
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _timed(self, call: Callable[[], object]) -> float:
        if not self._on_gpu:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
