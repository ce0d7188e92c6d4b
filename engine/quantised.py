"""Rows of K/V in eight bits: int8, or e4m3 ("FP8 Formats for Deep Learning", Micikevicius et al., 2022), and one power of two.

A row is what one token keeps in one plane. Its scale is 2**(exponent - 127), a float32's exponent field; the smallest one that
keeps the row's largest value within what the eight bits hold *after rounding*. So what comes out has at most eight significant
bits: bfloat16 and float32 carry it without loss, and quantising it again gives the same bits. Canonical bytes are the only
form that leaves an engine, however it keeps its pages. There is no negative zero.

This is the reference of ``engine.triton.quantising``.
"""

from __future__ import annotations

from typing import Literal

import torch

Kept = Literal["auto", "int8", "fp8"]  # auto: in the dtype of the model
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Of the largest value that rounds to what the eight bits hold: its exponent, and its mantissa as a float32 has it.
# int8: 127 = 1.984375 * 2**6. fp8: 464 = 1.8125 * 2**8, halfway between 448, the largest, and 480, and a tie to even is 448.
TOP_EXPONENT = {"int8": 6, "fp8": 8}
TOP_MANTISSA = {"int8": 0x7E0000, "fp8": 0x680000}
LEAST = 16  # exponents are no smaller: 2**-111 times the smallest value is still a normal float32
BROKEN = 255  # of rows that hold infinities or NaN: they come out as such
LARGEST_FP8 = 448.0


def quantise(rows: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` [..., head_dim] as values of the same shape in ``STORED[kept]``, and uint8 exponents [...]."""
    x = rows.float()
    bits = x.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dim=-1).view(torch.int32)
    above = ((bits & 0x7FFFFF) > TOP_MANTISSA[kept]).int()
    exponents = ((bits >> 23) - TOP_EXPONENT[kept] + above).clamp(min=LEAST)
    exponents = torch.where(bits >> 23 == BROKEN, BROKEN, exponents)
    inverse = ((254 - exponents).clamp(min=0) << 23).view(torch.float32)
    scaled = torch.where((exponents == BROKEN)[..., None], 1.0, x * inverse[..., None])
    if kept == "int8":
        return scaled.round().to(torch.int8), exponents.to(torch.uint8)
    values = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    return torch.where(values.float() == 0, 0.0, values.float()).to(torch.float8_e4m3fn), exponents.to(torch.uint8)


def dequantise(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32, shaped as ``values``."""
    scale = (exponents.int() << 23).view(torch.float32)
    return values.float() * scale[..., None]
