"""Steps of answers alone, one token each: the same launches in every step, so on a GPU they are captured once and replayed.

A step of few tokens has hundreds of launches of microseconds each; issued one by one from Python they take longer than the
device needs for them. A CUDA graph issues them all at once, but can read and write only the addresses that it was captured
with. So everything that changes lies in buffers that stay: ids, positions, ends and page tables, for the next power of two of
rows. Missing rows are padding: they end at 0, keep and read nothing, and nobody looks at what they answer. Nothing else depends
on the step: the splits of attention follow from lengths on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.blocks import blocks_for
from moonpool.engine.attention import Step
from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import PageTensor, sent
from moonpool.engine.triton.interpreting import compiled_for
from moonpool.engine.triton.plans import StepPlan, page_tables
from moonpool.engine.triton.step import TritonStep

_WARM_RUNS = 2  # before a capture, which allows no compiling, measuring or growing of libraries' workspaces


class Computes(Protocol):
    def compute(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """[tokens, vocabulary]. Waits for nothing, and its launches depend on the number of tokens only."""


class Answers:
    """Buffers, and where there is a GPU a graph, for each power of two of rows up to ``most``."""

    def __init__(self, of: Computes, memory: PageTensor, most: int, max_context: int) -> None:
        self._of = of
        self._memory = memory
        self._most = most
        self._pages = min(blocks_for(max_context, memory.layout.block_tokens), memory.pages)
        self._steps: dict[int, _Captured | _Buffered] = {}
        self._pool = torch.cuda.graph_pool_handle() if compiled_for(memory.device) else None

    def fit(self, spans: Sequence[Span], wanted: Sequence[int]) -> bool:
        """Whether ``forward`` computes this step: answers only, and all of them are asked for."""
        return len(spans) <= self._most and list(wanted) == list(range(len(spans))) and all(span.count == 1 for span in spans)

    def forward(self, ids: NDArray[np.int64], spans: Sequence[Span]) -> torch.Tensor:
        """[len(spans), vocabulary]; the next call may overwrite it."""
        return self._step(len(spans)).forward(ids, spans)

    def capture_all(self) -> None:
        """Now, rather than in somebody's first token. The largest first: the others fit into its memory. Writes no page."""
        for rows in reversed(sizes(self._most)):
            self._step(rows).forward(np.zeros(0, dtype=np.int64), ())

    def _step(self, rows: int) -> _Captured | _Buffered:
        size = next(size for size in sizes(self._most) if size >= rows)
        if size not in self._steps:
            buffered = _Buffered(self._of, self._memory, size, self._pages)
            self._steps[size] = buffered if self._pool is None else _Captured(buffered, self._pool)
        return self._steps[size]


def sizes(most: int) -> list[int]:
    """1, 2, 4 .. and ``most``."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


class _Buffered:
    """A step of ``rows`` answers at most, over tensors that stay."""

    def __init__(self, of: Computes, memory: PageTensor, rows: int, pages: int) -> None:
        self._of = of
        self.device = memory.device
        self._plan = StepPlan.of_answers(rows, pages, memory.device)
        self._step = TritonStep(memory, self._plan, None, None)
        self._numbers = torch.zeros((3, rows), dtype=torch.int64, device=memory.device)  # ids, positions, ends

    def forward(self, ids: NDArray[np.int64], spans: Sequence[Span]) -> torch.Tensor:
        self.fill(ids, spans)
        return self.compute()[: len(spans)]

    def fill(self, ids: NDArray[np.int64], spans: Sequence[Span]) -> None:
        numbers = np.zeros((3, self._numbers.shape[1]), dtype=np.int64)
        numbers[:, : len(spans)] = ids, [span.start for span in spans], [span.end for span in spans]
        self._numbers.copy_(sent(numbers, self.device))
        if spans:
            tables = page_tables(spans)
            self._plan.tables[: len(spans), : tables.shape[1]].copy_(sent(tables, self.device))

    def compute(self) -> torch.Tensor:
        ids, positions, ends = self._numbers
        self._plan.positions.copy_(positions)
        self._plan.span_end.copy_(ends)
        return self._of.compute(ids, positions, self._step)


class _Captured:
    """``of`` as a graph, whose memory other graphs of one ``pool`` share: only one of them is ever replayed at a time."""

    def __init__(self, of: _Buffered, pool: Any) -> None:
        self._of = of
        beside = torch.cuda.Stream(of.device)
        beside.wait_stream(torch.cuda.current_stream(of.device))
        with torch.cuda.stream(beside):
            for _ in range(_WARM_RUNS):  # all of it padding
                of.compute()
        torch.cuda.current_stream(of.device).wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._logits = of.compute()

    def forward(self, ids: NDArray[np.int64], spans: Sequence[Span]) -> torch.Tensor:
        self._of.fill(ids, spans)
        self._graph.replay()
        return self._logits[: len(spans)]
