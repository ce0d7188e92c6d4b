"""Attention of a step's rows of one token, over pages in place: what to do, told to the kernels of ``paged_kernels``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.core.layout import KVLayout
from moonpool.engine.attention import AttentionCall
from moonpool.engine.backends import Span
from moonpool.engine.openmp import call_on_team
from moonpool.engine.paged_kernels import JOB, SPLIT, TASK, UNIT, compiled_attention

ALONE_BYTES = 128 << 10  # of K and V that the calling thread reads faster than it wakes others


@dataclass(slots=True)
class _Plan:
    """What to read for one window; the same for every layer. ``job`` and ``units`` hold addresses of other arrays here."""

    units: NDArray[np.void]
    tasks: NDArray[np.void]
    taken: NDArray[np.int64]
    partials: NDArray[np.float32]
    job: NDArray[np.void]
    alone: bool


class DecodeRows:
    """One step's rows of one token each. K and V of these tokens are in their pages before ``attend``."""

    def __init__(self, layout: KVLayout, pages: torch.Tensor, spans: Sequence[Span]) -> None:
        """``pages``: [pages, layers, 2, kv_heads, block_tokens, head_dim], contiguous but for heads of others."""
        self._layout = layout
        self._pages = pages
        self._kv_heads = pages.shape[3]
        self._layer_bytes = pages.stride(1) * pages.element_size()
        self._first = np.array([span.first for span in spans])
        self._ends = np.array([span.end for span in spans])
        self._tables = [np.ascontiguousarray(span.table, dtype=np.int64) for span in spans]
        self._kernel = compiled_attention(layout.dtype)
        self._plans: dict[int | None, _Plan] = {}

    def attend(self, layer: int, call: AttentionCall, out: torch.Tensor) -> None:
        """Fills these rows' tokens of ``out``, [tokens, heads, head_dim], contiguous, in the dtype of the pages."""
        query = call.query.to(self._pages.dtype)
        if query.stride(2) != 1:
            query = query.contiguous()
        plan = self._plans.get(call.window)
        if plan is None:
            plan = self._plans[call.window] = self._plan(call, query.shape[0])
        plan.taken[0] = 0
        job = plan.job[0]
        job["keys"] = self._pages.data_ptr() + layer * self._layer_bytes
        job["query"], job["query_head"], job["query_token"] = query.data_ptr(), query.stride(0), query.stride(1)
        job["out"] = out.data_ptr()
        job["scaling"], job["softcap"] = call.scaling, call.softcap or 0.0
        call_on_team(self._kernel, plan.job.ctypes.data, 1 if plan.alone else torch.get_num_threads())

    def _plan(self, call: AttentionCall, heads: int) -> _Plan:
        layout = self._layout
        share = heads // self._kv_heads
        low = np.zeros_like(self._ends) if call.window is None else np.maximum(0, self._ends - call.window)
        grid = np.zeros((len(low), self._kv_heads), UNIT)
        grid["token"] = self._first[:, None]
        grid["head"] = np.arange(self._kv_heads)
        grid["table"] = np.array([table.ctypes.data for table in self._tables])[:, None]
        grid["low"], grid["end"] = low[:, None], self._ends[:, None]
        grid["parts"] = grid["left"] = ((self._ends - 1) // SPLIT - low // SPLIT + 1)[:, None]
        units = grid.reshape(-1)
        units["first_task"] = np.cumsum(units["parts"]) - units["parts"]
        tasks = np.zeros(int(units["parts"].sum()), TASK)
        tasks["unit"] = np.repeat(np.arange(len(units)), units["parts"])
        tasks["part"] = np.arange(len(tasks)) - units["first_task"][tasks["unit"]]
        partials, taken = np.empty((len(tasks), share, 2 + layout.head_dim), np.float32), np.zeros(1, np.int64)
        job = np.zeros(1, JOB)
        job["page_stride"], job["item"] = self._pages.stride(0), self._pages.element_size()
        job["values"] = self._pages.stride(2) // self._pages.stride(3)
        job["kv_heads"], job["share"] = self._kv_heads, share
        job["dim"], job["block_tokens"] = layout.head_dim, layout.block_tokens
        job["units"], job["unit_count"] = units.ctypes.data, len(units)
        job["tasks"], job["task_count"] = tasks.ctypes.data, len(tasks)
        job["partials"], job["taken"] = partials.ctypes.data, taken.ctypes.data
        alone = int((self._ends - low).sum()) * 2 * self._kv_heads * layout.row_bytes <= ALONE_BYTES
        return _Plan(units, tasks, taken, partials, job, alone)
