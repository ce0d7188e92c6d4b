"""Rank 1 or above of a worker, a process of its own: gets its share of the weights, then computes its part of every step.

It has no event loop, no page pool and no say in what is computed: which pages a row has comes with the step.
"""

from __future__ import annotations

import socket
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moonpool.core.layout import KVLayout
from moonpool.engine.fused_backend import FusedBackend
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.paged_kernels import compiled_attention
from moonpool.engine.recipe import Recipe
from moonpool.engine.tensor_parallel.groups import group_of
from moonpool.engine.tensor_parallel.line import Line, Step, Sums
from moonpool.engine.tensor_parallel.meeting import Meeting, Stopped
from moonpool.engine.tensor_parallel.shared_pages import SharedPages


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank is told first."""

    rank: int
    ranks: int
    folder: str
    threads: int
    layout: dict[str, str | int]
    pages: int
    layers: int  # whose weights come
    kv_heads: tuple[int, int]  # first of its own, and the one behind the last
    columns: int  # logits of one token that each rank computes
    sums: Sums
    timeout_s: float


class Rank:
    def __init__(self, line: Line, start: Start) -> None:
        self._line = line
        layout = KVLayout(**start.layout)  # type: ignore[arg-type]
        shared = SharedPages(line.received_fd(), start.pages * layout.block_bytes, start.ranks)
        shared.close()
        recipe: Recipe = line.part()
        recipe = replace(recipe, layers=tuple(line.part() for _ in range(start.layers)))
        compiled_attention(layout.dtype)
        folder = Path(start.folder) if start.folder else None
        group = group_of(start.sums, shared.meeting, folder, start.rank, start.ranks, start.timeout_s, line.ended)
        self._hidden, self._dtype = recipe.hidden, recipe.dtype
        self._meeting = Meeting(group, start.layers, recipe.hidden, start.columns, recipe.dtype)
        memory = PageTensor(layout, start.pages, memory=shared.bytes, heads=range(*start.kv_heads))
        self._part = FusedBackend(recipe, memory, reduce=self._meeting.sum)
        line.send_record({"ready": start.rank})

    def run(self) -> None:
        while step := self._line.step(self._hidden, self._dtype):
            self._compute(step)

    def _compute(self, step: Step) -> None:
        self._meeting.begin(len(step.x), len(step.wanted))
        try:
            x = self._part.through_layers(step.x, step.spans, None, None)
            if step.wanted:
                self._meeting.gather(self._part.logits(x, step.wanted))
        except Stopped:
            pass
        except (MemoryError, RuntimeError):  # the step fails, this rank goes on
            traceback.print_exc()
            self._meeting.leave()


def live(end: socket.socket) -> None:
    """Until there is nothing more to compute. EOFError, OSError or ``Parted``: rank 0 is gone, or does not answer."""
    line = Line(end)
    start = Start(**line.record())
    torch.set_num_threads(start.threads)
    with torch.inference_mode():
        Rank(line, start).run()
