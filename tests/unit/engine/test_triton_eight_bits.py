"""Triton's kernels over pages in eight bits, interpreted, against the reference over the values that these pages stand for."""

from __future__ import annotations

import pytest
import torch
from support.kernel_world import World

from moonpool.engine.quantised import Kept

ROWS = [(21, 1), (9, 12)]  # an answer, and a chunk of a prompt
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "dim": 16, "dtype": "float32", "window": 15},
        {"heads": 3, "kv_heads": 1, "dim": 24, "dtype": "bfloat16", "softcap": 5.0},
    ],
    ids=["float32", "bfloat16"],
)
@torch.inference_mode()
def test_triton_writes_what_the_reference_quantises_and_attends_to_what_it_means(kept: Kept, shape: dict[str, object]) -> None:
    world = World(ROWS, kept=kept, block=16, **shape)  # type: ignore[arg-type]
    got, want = world.step(world.call(), 1)
    torch.testing.assert_close(got, want, atol=TOLERANCE[world.dtype], rtol=TOLERANCE[world.dtype])
    assert world.holds_what_was_written()


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@torch.inference_mode()
def test_triton_keeps_latents_in_eight_bits_too(kept: Kept) -> None:
    world = World(ROWS, heads=2, kv_heads=1, dim=24, block=16, dtype="float32", latent=True, kept=kept)
    got, want = world.step(world.latent_call(16), 0)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert world.holds_what_was_written()
