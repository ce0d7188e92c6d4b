"""The second half of a layer with PyTorch's kernels: a gated MLP, a choice of experts, or both."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from moonpool.core.errors import Bug
from moonpool.engine.linears import Linear, linear_of
from moonpool.engine.recipe import Activation, Experts, Layer, Projection


class Mlp(Protocol):
    def __call__(self, m: torch.Tensor, /) -> torch.Tensor:
        """[tokens, hidden] of normed states ``m``."""

    def added(self, m: torch.Tensor, to: torch.Tensor, /) -> torch.Tensor:
        """``self(m) + to``."""


class GatedMlp:
    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up, self._down, self._silu = gate_up, down, activation == "silu"

    def __call__(self, m: torch.Tensor) -> torch.Tensor:
        return self._down(self._inner(m))

    def added(self, m: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return self._down.added(self._inner(m), to)

    def _inner(self, m: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(m).chunk(2, dim=1)
        active = functional.silu(gate) if self._silu else functional.gelu(gate, approximate="tanh")
        return active.mul_(up)


class ExpertMlp:
    """Tokens are sorted by expert, so that each expert reads its weights once a step.

    What the experts of a token say is summed in the order in which the router ranks them: in any company the same.
    """

    def __init__(self, experts: Experts, dense: GatedMlp | None, activation: Activation) -> None:
        """``experts`` gives its weights away: they are packed here."""
        self._of = experts
        self._dense = dense
        pairs = zip(experts.gate_up, experts.down, strict=True)
        self._each = [GatedMlp(linear_of(Projection(up)), linear_of(Projection(down)), activation) for up, down in pairs]
        experts.let_go()

    def __call__(self, m: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._choose(m)
        said = m.new_empty((chosen.numel(), m.shape[1]))
        order = chosen.view(-1).argsort(stable=True)  # (token, rank) pairs by expert
        sorted_m, at = m[order // self._of.top_k], 0
        for expert, count in enumerate(torch.bincount(chosen.view(-1), minlength=len(self._each)).tolist()):
            if count:
                said[order[at : at + count]] = self._each[expert](sorted_m[at : at + count])
                at += count
        whole = (said.view(*chosen.shape, -1).float() * weights[:, :, None]).sum(1).to(m.dtype)
        return whole if self._dense is None else whole + self._gated(m, self._dense)

    def added(self, m: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return self(m).add_(to)

    def _choose(self, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights and numbers of each token's experts, [tokens, top_k] each. Logits are rounded as the library's."""
        of = self._of
        weights, chosen = functional.linear(m, of.router).softmax(1, dtype=torch.float32).topk(of.top_k, dim=1)
        return (weights / weights.sum(1, keepdim=True) if of.normalised else weights), chosen

    def _gated(self, m: torch.Tensor, dense: GatedMlp) -> torch.Tensor:
        gate = self._of.dense_gate
        return dense(m) if gate is None else functional.linear(m, gate.weight, gate.bias).sigmoid() * dense(m)


def mlp_of(layer: Layer, activation: Activation) -> Mlp:
    dense = None
    if layer.gate_up is not None and layer.down is not None:
        dense = GatedMlp(linear_of(layer.gate_up), linear_of(layer.down), activation)
    if layer.experts is not None:
        return ExpertMlp(layer.experts, dense, activation)
    if dense is None:
        raise Bug("a layer of a recipe without an MLP")
    return dense
