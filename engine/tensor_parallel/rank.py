"""Rank 1 or above of a worker, a process of its own: gets its share of the weights, then computes its part of every step.

It has no event loop, no page pool and no say in what is computed: which pages a row has comes with the step.
"""

from __future__ import annotations

import socket
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moonpool.core.layout import KVLayout
from moonpool.engine.recipe import Recipe
from moonpool.engine.tensor_parallel.groups import group_of
from moonpool.engine.tensor_parallel.keeping import Keeping, enter, placed
from moonpool.engine.tensor_parallel.line import Line, Step, Sums
from moonpool.engine.tensor_parallel.meeting import Meeting, Stopped
from moonpool.engine.tensor_parallel.moves import Mover
from moonpool.engine.tensor_parallel.part import part_of
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
    keeping: dict[str, Any]


class Rank:
    def __init__(self, line: Line, start: Start) -> None:
        self._line = line
        keeping = Keeping(**start.keeping)
        device = keeping.device_of(start.rank)
        enter(device)
        layout = KVLayout(**start.layout)  # type: ignore[arg-type]
        shared = SharedPages(line.received_fd(), start.pages * layout.block_bytes, start.ranks)
        shared.close()
        moves = socket.socket(fileno=line.received_fd()) if keeping.apart else None
        recipe: Recipe = placed(line.part(), device)
        recipe = replace(recipe, layers=tuple(placed(line.part(), device) for _ in range(start.layers)))
        folder = Path(start.folder) if start.folder else None
        group = group_of(start.sums, shared.meeting, folder, start.rank, start.ranks, start.timeout_s, line.ended, device)
        self._hidden, self._dtype = recipe.hidden, recipe.dtype
        self._meeting = Meeting(
            group, start.layers, recipe.hidden, start.columns, recipe.dtype, device=device, apart=keeping.apart
        )
        heads = range(*start.kv_heads)
        self._part = part_of(recipe, keeping, start.rank, layout, shared.bytes, heads, self._meeting)
        self._mover = None
        if moves is not None and self._part.view is not None:
            self._mover = Mover(moves, self._part.view, device)
        line.send_record({"ready": start.rank})

    def run(self) -> None:
        try:
            while step := self._line.step(self._hidden, self._dtype):
                self._compute(step)
        finally:
            if self._mover is not None:
                self._mover.close()

    def _compute(self, step: Step) -> None:
        self._meeting.begin(len(step.x), len(step.wanted), sends=step.sends)
        try:
            x = self._part.through_layers(step.x, step)
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
