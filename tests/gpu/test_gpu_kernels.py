"""Every kernel on the GPU, at sizes of real models, against its reference on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernel_world import LAYERS, World

from moonpool.engine.page_tensor import PageTensor
from moonpool.engine.quantised import Kept, quantise
from moonpool.engine.slice_packing import TorchPacking
from moonpool.engine.triton.packing import TritonPacking

DEVICE = torch.device("cuda")
ANSWERS = [(n, 1) for n in (0, 1, 63, 64, 500, 4_095, 8_191)]
CHUNKS = [(0, 300), (1_000, 513), (4_000, 64)]
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-3}


@pytest.mark.parametrize("rows", [ANSWERS, CHUNKS, [ANSWERS[4], CHUNKS[1], ANSWERS[6]]], ids=["answers", "chunks", "mixed"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"heads": 28, "kv_heads": 4},
        {"heads": 16, "kv_heads": 16, "dim": 64, "dtype": "float32"},
        {"window": 1_024, "softcap": 50.0, "heads": 8, "kv_heads": 4, "dim": 256},
    ],
    ids=["llama", "qwen", "float32", "gemma"],
)
@torch.inference_mode()
def test_attention_and_kv_write_equal_the_reference(rows: list[tuple[int, int]], shape: dict[str, Any]) -> None:
    world = World(rows, device=DEVICE, **shape)
    for layer in range(LAYERS):
        got, want = world.step(world.call(), layer)
        torch.testing.assert_close(got, want, atol=TOLERANCE[world.dtype], rtol=TOLERANCE[world.dtype])
    assert world.holds_what_was_written()


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [ANSWERS, CHUNKS], ids=["answers", "chunks"])
@torch.inference_mode()
def test_attention_over_pages_in_eight_bits_equals_the_reference_over_their_values(
    kept: Kept, rows: list[tuple[int, int]]
) -> None:
    world = World(rows, kept=kept, device=DEVICE)
    got, want = world.step(world.call(), 1)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert world.holds_what_was_written()


@pytest.mark.parametrize("kept", ["auto", "fp8"])
@pytest.mark.parametrize("rows", [ANSWERS, CHUNKS], ids=["answers", "chunks"])
@torch.inference_mode()
def test_latent_attention_equals_the_reference(kept: Kept, rows: list[tuple[int, int]]) -> None:
    world = World(rows, heads=16, kv_heads=1, dim=576, latent=True, kept=kept, device=DEVICE)
    got, want = world.step(world.latent_call(512), 0)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
@torch.inference_mode()
def test_slices_are_packed_and_unpacked_bit_by_bit_as_the_reference_does(kept: Kept) -> None:
    layout = World([(0, 1)]).layout
    memory, host = PageTensor(layout, 40, device=DEVICE, kept=kept), PageTensor(layout, 40, kept=kept)
    pages = [39, 0, 7, 20]
    rows = torch.randn((len(pages), layout.slice_bytes // layout.row_bytes, layout.head_dim))
    rows *= torch.exp2(8 * torch.randn((*rows.shape[:2], 1)))
    data = rows.to(torch.bfloat16).view(torch.uint8).view(len(pages), -1)
    kernels, reference = TritonPacking(memory), TorchPacking(host)
    kernels.unpack(pages, 1, data.to(DEVICE))
    reference.unpack(pages, 1, data)
    valid = [64, 1, 33, 64]
    assert torch.equal(kernels.pack(pages, 1, valid).cpu(), reference.pack(pages, 1, valid))
    assert torch.equal(memory.tensor.view(torch.uint8).cpu(), host.tensor.view(torch.uint8))
    if memory.exponents is not None and host.exponents is not None:
        assert torch.equal(memory.exponents.cpu(), host.exponents)
        whole = kernels.pack(pages, 1, [64] * 4)
        kernels.unpack(pages, 1, whole)
        assert torch.equal(kernels.pack(pages, 1, [64] * 4), whole)


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@torch.inference_mode()
def test_the_reference_quantises_alike_on_both_devices(kept: Kept) -> None:
    rows = torch.randn((4_096, 128)) * torch.exp2(10 * torch.randn((4_096, 1)))
    for here, there in zip(quantise(rows, kept), quantise(rows.to(DEVICE), kept), strict=True):
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
