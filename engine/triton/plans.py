"""What the kernels have to know of one step: which token is of which row of the batch, where, and in which pages.

Made once per step on the host and sent to the device in one piece; all layers read it. What depends on the number of heads
(tiles) is made when the first layer asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from moonpool.engine.backends import Span
from moonpool.engine.page_tensor import sent
from moonpool.engine.triton.tiling import Tiling, narrow_rows, tiling_of, wide_rows

_ALIGN = 4  # int32: Triton compiles anew for a pointer that is not at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries of one launch, ``rows`` of them a tile. int32 [tiles] each; ``flat`` counts a span's (token, head) pairs."""

    span: torch.Tensor
    flat: torch.Tensor
    rows: int
    filled: int  # queries that a tile has at most
    longest: int | None  # sequence of any of them, in tokens; None: open
    tokens: int  # of one span at most


@dataclass(frozen=True, slots=True)
class StepPlan:
    """``spans`` rows of a step. A span that ends at 0 is padding: nothing is written or read for it, and it answers zeros."""

    counts: tuple[int, ...]  # tokens of each span
    ends: tuple[int, ...] | None  # of each sequence with them; None: open, whatever ``span_end`` says when a kernel runs
    token_span: torch.Tensor  # int32 [tokens]
    positions: torch.Tensor  # int32 [tokens]
    span_first: torch.Tensor  # int32 [spans]
    span_count: torch.Tensor  # int32 [spans]
    span_end: torch.Tensor  # int32 [spans]
    tables: torch.Tensor  # int32 [spans, pages of the longest]
    tiling: Tiling
    _tiles: dict[tuple[bool, int, int], Tiles | None] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device, tiling: Tiling | None = None) -> StepPlan:
        counts = np.array([span.count for span in spans])
        parts = [
            np.repeat(np.arange(len(spans)), counts),
            np.concatenate([np.arange(span.start, span.end) for span in spans]),
            np.array([span.first for span in spans]),
            counts,
            np.array([span.end for span in spans]),
            page_tables(spans).reshape(-1),
        ]
        token_span, positions, first, count, end, tables = sent_together(parts, device)
        ends = tuple(span.end for span in spans)
        shaped = tables.view(len(spans), -1)
        return cls(tuple(counts.tolist()), ends, token_span, positions, first, count, end, shaped, tiling or tiling_of(device))

    @classmethod
    def of_answers(cls, batch: int, pages: int, device: torch.device, tiling: Tiling | None = None) -> StepPlan:
        """For any ``batch`` spans of one token with up to ``pages`` pages: all padding, until its tensors are filled."""
        order = torch.arange(batch, dtype=torch.int32, device=device)
        nothing, ones = torch.zeros_like(order), torch.ones_like(order)
        tables = torch.zeros((batch, pages), dtype=torch.int32, device=device)
        filled = (order.clone(), nothing.clone(), order, ones, nothing.clone(), tables)
        return cls((1,) * batch, None, *filled, tiling or tiling_of(device))

    def answers(self, share: int) -> Tiles | None:
        """Of the spans of one token, where ``share`` heads have the same K/V head."""
        return self._made(True, share, narrow_rows(share))

    def chunks(self, share: int, values: int, dtype: torch.dtype) -> Tiles | None:
        """Of the longer spans, whose values have so many columns. Those with the most keys come first."""
        return self._made(False, share, wide_rows(self.tiling, values, dtype))

    def _made(self, single: bool, share: int, rows: int) -> Tiles | None:
        key = (single, share, rows)
        if key not in self._tiles:
            self._tiles[key] = self._cut(single, share, rows)
        return self._tiles[key]

    def _cut(self, single: bool, share: int, rows: int) -> Tiles | None:
        mine = [i for i, count in enumerate(self.counts) if (count == 1) == single]
        if not mine:
            return None
        ends = self.ends or (0,) * len(self.counts)
        cut = [(i, flat) for i in mine for flat in range(0, self.counts[i] * share, rows)]
        cut.sort(key=lambda tile: tile[1] // share - self.counts[tile[0]] + ends[tile[0]], reverse=True)
        span, flat = sent_together([np.array(column) for column in zip(*cut, strict=True)], self.tables.device)
        most = max(self.counts[i] for i in mine)
        longest = None if self.ends is None else max(ends[i] for i in mine)
        return Tiles(span, flat, rows, min(rows, most * share), longest, most)


def page_tables(spans: Sequence[Span]) -> NDArray[np.int32]:
    """[spans, pages of the longest]; zero behind the end of a row, where nobody looks."""
    tables = np.zeros((len(spans), max(len(span.table) for span in spans)), dtype=np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.table)] = span.table
    return tables


def sent_together(parts: Sequence[NDArray[np.int_]], device: torch.device) -> list[torch.Tensor]:
    """int32 copies on ``device``, by one transfer that nobody waits for."""
    places = np.cumsum([0, *(-(-len(part) // _ALIGN) * _ALIGN for part in parts)]).tolist()
    whole = np.zeros(places[-1], dtype=np.int32)
    for place, part in zip(places, parts, strict=False):
        whole[place : place + len(part)] = part
    there = sent(whole, device)
    return [there[place : place + len(part)] for place, part in zip(places, parts, strict=False)]
