"""Weights in the order that a product reads them; see the picture in ``moonpool.engine.compiled``."""

from __future__ import annotations

import torch

from moonpool.engine.compiled.tiles import GROUP


def padded(outputs: int) -> int:
    """Rows of packed weights: whole groups."""
    return -(-outputs // GROUP) * GROUP


def pack(weight: torch.Tensor) -> torch.Tensor:
    """bf16 [outputs, inputs] to [outputs / 16, inputs / 2, 16, 2]; missing outputs of the last group are zero."""
    outputs, inputs = weight.shape
    full = padded(outputs)
    if full != outputs:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, full - outputs))
    return weight.view(full // GROUP, GROUP, inputs // 2, 2).permute(0, 2, 1, 3).contiguous()


def pack_bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """float32 [whole groups], zero where there is none."""
    out = torch.zeros(padded(outputs))
    if bias is not None:
        out[:outputs] = bias.float()
    return out


def by_turns(gate_up: torch.Tensor) -> torch.Tensor:
    """[2 * intermediate, ...], gate before up, to groups of 16 of gate and of up in turns: one tile then holds both."""
    half = gate_up.shape[0] // 2
    gate, up = (part.view(half // GROUP, GROUP, *gate_up.shape[1:]) for part in (gate_up[:half], gate_up[half:]))
    return torch.stack((gate, up), dim=1).view(gate_up.shape)
