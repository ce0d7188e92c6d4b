"""Where K/V lie in pages, and the only two places of the kernels that read and write them.

A *row* is what one token keeps in one plane: K or V of one head, or the latent. Rows are numbered as ``PageTensor.rows`` has
them, ``((page * layers + layer) * planes + plane) * block_tokens + slot``; so the row's number finds its elements, and its
scale where pages are quantised. Numbers are int64: pages of a big device hold more than 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moonpool.engine.triton.quantising import exponents_of, quantised, scales_of


@triton.jit
def page_rows(
    table, tokens, held, layer, plane, LAYERS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """int64, shaped as ``tokens``: the rows of these positions of the sequence whose page table begins at ``table``.

    Pages are looked up token by token: neighbours share a cache line, and any block size is right. Where ``MASKED``, positions
    that are not ``held`` have no page and give a row that nobody may touch.
    """
    if MASKED:
        page = tl.load(table + tokens // BLOCK, mask=held, other=0)
    else:
        page = tl.load(table + tokens // BLOCK)
    return ((page.to(tl.int64) * LAYERS + layer) * PLANES + plane) * BLOCK + tokens % BLOCK


@triton.jit
def load_rows(
    pages,
    scales,
    rows,
    held,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
    DOT: tl.constexpr,
):
    """[rows, PADDED] in the dtype ``DOT``: columns FIRST .. FIRST + WIDTH - 1 of ``rows``, which are STRIDE elements long.

    Zero in padding columns and, where ``MASKED``, in rows that are not ``held``: what lies there is never read (it may be
    NaN, and zero weight times NaN is NaN). ``KIND`` says what pages hold: "auto", numbers of the model's dtype; else eight bits
    and in ``scales`` an exponent for each row (``engine.quantised``), whose values any ``DOT`` holds exactly.
    """
    columns = tl.arange(0, PADDED)
    places = pages + rows[:, None] * STRIDE + (FIRST + columns)[None, :]
    if MASKED:
        tile = tl.load(places, mask=held[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif PADDED == WIDTH:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(columns < WIDTH)[None, :], other=0.0)
    if KIND == "auto":
        return tile.to(DOT)
    if MASKED:
        exponents = tl.load(scales + rows, mask=held, other=0)
    else:
        exponents = tl.load(scales + rows)
    return (tile.to(tl.float32) * scales_of(exponents)[:, None]).to(DOT)


@triton.jit
def store_rows(
    pages, scales, rows, live, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr, STRIDE: tl.constexpr, KIND: tl.constexpr
):
    """Writes ``tile`` [rows, PADDED], whole rows of WIDTH elements, where ``live``; its padding columns are zero."""
    columns = tl.arange(0, PADDED)
    places = pages + rows[:, None] * STRIDE + columns[None, :]
    if KIND != "auto":
        exponents = exponents_of(tile, KIND)
        tl.store(scales + rows, exponents.to(tl.uint8), mask=live)
        tile = quantised(tile, exponents, KIND)
    tl.store(places, tile.to(pages.dtype.element_ty), mask=live[:, None] & (columns < WIDTH)[None, :])
