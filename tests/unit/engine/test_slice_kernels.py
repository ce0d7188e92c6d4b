"""Triton's kernels between pages and canonical slices, in the interpreter, against the reference with PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.layout import KV, MLA, KVLayout
from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.quantised import Kept, dequantise, quantise
from moonpool.engine.slice_packing import TorchPacking
from moonpool.engine.triton.packing import TritonPacking

LAYERS, PAGES = 2, 5


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    kind = draw(st.sampled_from([KV, MLA]))
    heads = 1 if kind == MLA else draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    width = draw(st.sampled_from([8, 24, 64]))
    return KVLayout("m", LAYERS, heads, width, dtype, draw(st.sampled_from([16, 24])), kind=kind)


def slices_of(layout: KVLayout, count: int, seed: int) -> torch.Tensor:
    """uint8 [count, slice_bytes] of random numbers, sizes of rows apart by powers of two, one row all zeros."""
    draw = torch.Generator().manual_seed(seed)
    shape = (count, layout.planes * layout.block_tokens, layout.head_dim)
    x = torch.randn(shape, generator=draw) * torch.exp2(6 * torch.randn((*shape[:2], 1), generator=draw))
    x[0, 3] = 0
    return x.to(getattr(torch, layout.dtype)).view(torch.uint8).view(count, -1)


def raw(memory: PageTensor) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    parts = [memory.tensor] if memory.exponents is None else [memory.tensor, memory.exponents]
    return [part.view(torch.uint8).numpy() for part in parts]


@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
@settings(max_examples=5)
@given(layout=layouts(), seed=st.integers(0, 1 << 20), layer=st.integers(0, LAYERS - 1))
def test_the_kernels_do_what_the_reference_does(kept: Kept, layout: KVLayout, seed: int, layer: int) -> None:
    by_kernel, by_torch = (PageTensor(layout, PAGES, kept=kept) for _ in range(2))
    pages, data = [4, 0, 2], slices_of(layout, 3, seed)
    kernel, reference = TritonPacking(by_kernel), TorchPacking(by_torch)
    kernel.unpack(pages, layer, data)
    reference.unpack(pages, layer, data)
    for got, want in zip(raw(by_kernel), raw(by_torch), strict=True):
        assert (got == want).all()
    valid = [layout.block_tokens, 1 + seed % layout.block_tokens, 1]
    packed = kernel.pack(pages, layer, valid)
    assert torch.equal(packed, reference.pack(pages, layer, valid))
    whole = kernel.pack(pages, layer, [layout.block_tokens] * 3)
    if kept == "auto":
        assert torch.equal(whole, data)
    kernel.unpack(pages, layer, whole)
    assert torch.equal(kernel.pack(pages, layer, [layout.block_tokens] * 3), whole), "what has been quantised stays as it is"
    for got, want in zip(raw(by_kernel), raw(by_torch), strict=True):
        assert (got == want).all()


@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_the_kernels_round_as_the_reference_does_at_every_border(kept: Kept) -> None:
    """Halfway values, subnormal ones, infinities and NaN."""
    layout = KVLayout("m", 1, 1, 16, "float32", 16)
    top = 127.0 if kept == "int8" else 448.0
    rows = torch.zeros((2 * 16, 16))
    rows[:, 0] = top
    rows[:16, 1:] = (torch.arange(16 * 15).view(16, 15) - 120) / (2.0 if kept == "int8" else 2.0**10)
    rows[16:, 1:] = torch.linspace(-top, top, 16 * 15).view(16, 15)
    rows[20, 0], rows[21, 0], rows[22, 0], rows[23, 3] = top * 1.01, torch.inf, torch.nan, -torch.inf
    rows[24], rows[25] = 1e-39, -0.0
    memory = PageTensor(layout, 1, kept=kept)
    TritonPacking(memory).unpack([0], 0, rows.view(torch.uint8).view(1, -1))
    values, exponents = quantise(rows, kept)
    assert memory.exponents is not None
    assert torch.equal(memory.exponents.view(-1), exponents)
    assert torch.equal(memory.tensor.view(torch.uint8).view(-1, 16), values.view(torch.uint8))
    out = dequantise(values, exponents)
    packed = TritonPacking(memory).pack([0], 0, [16]).view(torch.float32).view(-1, 16)
    assert torch.equal(packed, out)
