"""Layer slices between pages and canonical bytes: see ``engine.slice_packing``, which is the reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from moonpool.engine.page_tensor import PageTensor, sent
from moonpool.engine.triton.interpreting import launched
from moonpool.engine.triton.rows import load_rows, store_rows

_TILE = 4096  # elements of a program: a few loads of 16 bytes for each of 128 threads


@triton.jit(do_not_specialize=["layer"])
def _pack(
    pages,
    scales,
    out,  # [slices, ROWS_A_SLICE, WIDTH]
    table,  # int64 [slices]
    valid,  # int64 [slices]
    layer,
    LAYERS: tl.constexpr,
    ROWS_A_SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (slices, ROWS_A_SLICE / ROWS). Rows of tokens that are not valid are written as zeros, and not read."""
    one = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < ROWS_A_SLICE
    held = inside & (row % BLOCK < tl.load(valid + one))
    rows = (tl.load(table + one) * LAYERS + layer) * ROWS_A_SLICE + row
    tile = load_rows(pages, scales, rows, held, 0, WIDTH, PADDED, WIDTH, True, KIND, out.dtype.element_ty)
    columns = tl.arange(0, PADDED)
    there = out + (one * ROWS_A_SLICE + row)[:, None] * WIDTH + columns[None, :]
    tl.store(there, tile, mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit(do_not_specialize=["layer"])
def _unpack(
    data,  # [slices, ROWS_A_SLICE, WIDTH]
    pages,
    scales,
    table,
    layer,
    LAYERS: tl.constexpr,
    ROWS_A_SLICE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The same grid."""
    one = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < ROWS_A_SLICE
    columns = tl.arange(0, PADDED)
    here = data + (one * ROWS_A_SLICE + row)[:, None] * WIDTH + columns[None, :]
    tile = tl.load(here, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)
    rows = (tl.load(table + one) * LAYERS + layer) * ROWS_A_SLICE + row
    store_rows(pages, scales, rows, inside, tile, WIDTH, PADDED, WIDTH, KIND)


class TritonPacking:
    """As ``slice_packing.Packing``. Nothing here waits for the device."""

    def __init__(self, memory: PageTensor) -> None:
        layout = memory.layout
        self._memory = memory
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._rows = layout.planes * layout.block_tokens
        self._padded = triton.next_power_of_2(layout.head_dim)
        self._tile_rows = max(1, min(_TILE // self._padded, triton.next_power_of_2(self._rows)))
        self._exponents = memory.tensor if memory.exponents is None else memory.exponents

    def pack(self, pages: Sequence[int], layer: int, valid: Sequence[int]) -> torch.Tensor:
        layout, device = self._memory.layout, self._memory.device
        out = torch.empty((len(pages), self._rows, layout.head_dim), dtype=self._dtype, device=device)
        launched(_pack)[self._grid(pages)](
            self._memory.tensor,
            self._exponents,
            out,
            sent(np.array(pages, dtype=np.int64), device),
            sent(np.array(valid, dtype=np.int64), device),
            layer,
            LAYERS=layout.layers,
            ROWS_A_SLICE=self._rows,
            BLOCK=layout.block_tokens,
            WIDTH=layout.head_dim,
            PADDED=self._padded,
            KIND=self._memory.kept,
            ROWS=self._tile_rows,
        )
        return out.view(torch.uint8).view(len(pages), -1)

    def unpack(self, pages: Sequence[int], layer: int, data: torch.Tensor) -> None:
        layout, device = self._memory.layout, self._memory.device
        launched(_unpack)[self._grid(pages)](
            data.view(self._dtype),
            self._memory.tensor,
            self._exponents,
            sent(np.array(pages, dtype=np.int64), device),
            layer,
            LAYERS=layout.layers,
            ROWS_A_SLICE=self._rows,
            WIDTH=layout.head_dim,
            PADDED=self._padded,
            KIND=self._memory.kept,
            ROWS=self._tile_rows,
        )

    def _grid(self, pages: Sequence[int]) -> tuple[int, int]:
        return len(pages), triton.cdiv(self._rows, self._tile_rows)
