"""Rows in eight bits: what comes out goes in again as the same bits, and how far it is from what went in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool.engine.quantised import BROKEN, LEAST, STORED, Kept, dequantise, quantise

KEPT: list[Kept] = ["int8", "fp8"]
WORST = {
    "int8": 1 / 127,
    "fp8": 1 / 16,
}  # int8: of the row's largest value, at most half a step of 64 to 127; fp8: of each value


def rows_of(seed: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    """[40, 24] whose rows have sizes from a tiny to a large power of two, some of them with one large value."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn((40, 24), generator=draw) * torch.exp2(spread * torch.randn((40, 1), generator=draw))
    x[::5, 3] *= 200
    return x.to(dtype)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(seed=st.integers(0, 1 << 30), spread=st.floats(0, 20))
def test_what_comes_out_fits_the_dtype_and_quantises_to_the_same_bits(
    kept: Kept, dtype: torch.dtype, seed: int, spread: float
) -> None:
    x = rows_of(seed, spread, dtype)
    values, exponents = quantise(x, kept)
    assert values.dtype is STORED[kept]
    out = dequantise(values, exponents)
    assert torch.equal(out.to(torch.bfloat16).float(), out), "bfloat16 carries it without loss"
    again, exponents_again = quantise(out.to(dtype), kept)
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(exponents_again, exponents)


@pytest.mark.parametrize("kept", KEPT)
@given(seed=st.integers(0, 1 << 30), spread=st.floats(0, 20))
def test_how_far_it_is_from_what_went_in(kept: Kept, seed: int, spread: float) -> None:
    x = rows_of(seed, spread, torch.float32)
    values, exponents = quantise(x, kept)
    apart = (dequantise(values, exponents) - x).abs()
    largest = x.abs().amax(dim=1, keepdim=True)
    if kept == "int8":
        assert (apart <= WORST[kept] * largest).all()
    else:
        step = torch.exp2(exponents.float() - 127)[:, None] * 2.0**-10  # half of fp8's smallest step
        assert (apart <= torch.maximum(WORST[kept] * x.abs(), step)).all()


@pytest.mark.parametrize("kept", KEPT)
def test_every_stored_value_is_the_value_it_stands_for(kept: Kept) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(STORED[kept])
    numbers = codes.float()[torch.isfinite(codes.float())]
    top = numbers.abs().max()
    numbers = numbers[numbers > -128]
    rows = torch.stack((numbers, torch.full_like(numbers, float(top if kept == "fp8" else 127))), dim=1) * 2.0**-20
    values, exponents = quantise(rows, kept)
    assert torch.equal(dequantise(values, exponents), rows)
    assert (exponents == 107).all()


@pytest.mark.parametrize("kept", KEPT)
def test_borders_between_two_scales_fall_on_one_side(kept: Kept) -> None:
    """The largest value a hair below and above each border, the border itself among them."""
    border = 127.0 if kept == "int8" else 464.0
    near = np.array([np.nextafter(np.float32(border), np.float32(d)) for d in (0, 1e9)] + [border], dtype=np.float32)
    rows = torch.from_numpy(near)[:, None] * torch.tensor([[1.0, -0.3]])
    values, exponents = quantise(rows, kept)
    assert exponents.tolist() == [127, 128, 127]
    out = dequantise(values, exponents)
    assert torch.equal(quantise(out, kept)[1], exponents)


@pytest.mark.parametrize("kept", KEPT)
def test_zeros_tiny_values_and_what_is_no_number(kept: Kept) -> None:
    rows = torch.tensor([[0.0, -0.0], [1e-40, -1e-38], [math.inf, 1.0], [math.nan, 1.0], [3e38, -3e38]])
    values, exponents = quantise(rows, kept)
    out = dequantise(values, exponents)
    assert exponents[0] == exponents[1] == LEAST
    assert not out[0].any() and not torch.signbit(out[0]).any()
    assert (exponents[2:4] == BROKEN).all() and not torch.isfinite(out[2:4]).any()
    torch.testing.assert_close(out[4], rows[4], rtol=1 / 16, atol=0)
