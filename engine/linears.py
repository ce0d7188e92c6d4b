"""Matrix products with constant weights, as fast as PyTorch's CPU libraries have them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from moonpool.engine.low_rank import LowRanks
from moonpool.engine.recipe import Projection

PACKED = frozenset({torch.bfloat16})  # dtypes that oneDNN multiplies from blocked weights; float32 is faster by MKL


class Linear(Protocol):
    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """[tokens, inputs] to [tokens, outputs]."""

    def added(self, x: torch.Tensor, to: torch.Tensor, /) -> torch.Tensor:
        """``self(x) + to``."""


class _Plain:
    def __init__(self, projection: Projection) -> None:
        self._weight, self._bias = projection.weight, projection.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def added(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias).add_(to)


class _Packed:
    """Weights in the order in which oneDNN reads them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._run = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._run(x, self._weight, self._bias, "none", [], "")
        return y

    def added(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return self(x).add_(to)


class _Adapted:
    def __init__(self, base: Linear, low_ranks: LowRanks) -> None:
        self._base, self._low_ranks = base, low_ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._low_ranks.add(x, self._base(x))

    def added(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return self._low_ranks.add(x, self._base.added(x, to))


def linear_of(projection: Projection, *, keep: bool = False) -> Linear:
    """Unless ``keep``, a packed copy takes the place of the weight, whose memory is let go at once."""
    base = _linear(projection, keep)
    return base if projection.low_ranks is None else _Adapted(base, projection.low_ranks)


def _linear(projection: Projection, keep: bool) -> Linear:
    weight = projection.weight
    packed = _pack(weight) if weight.dtype in PACKED and weight.device.type == "cpu" else None
    if packed is None:
        return _Plain(projection)
    if not keep:
        projection.let_go()
    return _Packed(packed, projection.bias)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """None where this PyTorch or this CPU has no such product, or one that does not work."""
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return None
    return packed
