"""What a Llama-shaped decoder computes, as data: the weights of its layers and the few choices in which families differ.

For token states x [tokens, hidden], layer by layer::

    a = norm(x, attention_norm)
    q, k, v = split(a @ qkv.weight.T + qkv.bias)          heads, kv_heads and kv_heads times head_dim
    q, k = head_norm(q, query_norm), head_norm(k, key_norm)
    q, k = rotate(q), rotate(k)                           pairs (i, i + head_dim / 2), angle position * frequencies[i]
    o = attention(q, k, v)                                scaling, window, softcap
    x = x + norm(o @ out.weight.T + out.bias, after_attention_norm)
    m = norm(x, mlp_norm)
    gate, up = split(m @ gate_up.weight.T + gate_up.bias)
    x = x + norm((activation(gate) * up) @ down.weight.T + down.bias, after_mlp_norm)

then ``head @ norm(x, final_norm)``, soft-capped where the model says so. ``norm(x, w)`` is x / rms(x) * w; families whose
norm multiplies by 1 + w have that 1 added to their weights here. A norm or bias that a family lacks is None, and skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Projection:
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None = None  # [outputs]

    def let_go(self) -> None:
        """A packed copy takes the place of the weight, whose memory is free at once."""
        self.weight.data = self.weight.new_empty(0)


@dataclass(frozen=True, slots=True)
class Rotary:
    """``cos`` and ``sin`` float32 [max_context, head_dim / 2], scaled as the family's rope kind asks for."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor  # float32, as all norms: [hidden], query_norm and key_norm [head_dim]
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Projection
    after_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection
    after_mlp_norm: torch.Tensor | None
    window: int | None  # keys a query sees, itself included
    rotary: int  # index into ``Recipe.rotaries``


@dataclass(frozen=True, slots=True)
class Recipe:
    """Weights in the dtype of the model, norms in float32."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    eps: float
    activation: Activation
    scaling: float  # of attention scores
    attention_softcap: float | None
    embedding: torch.Tensor  # [vocabulary, hidden]
    embedding_scale: float
    layers: tuple[Layer, ...]
    rotaries: tuple[Rotary, ...]
    final_norm: torch.Tensor
    head: Projection  # [vocabulary, hidden]; may be the embedding itself
    logits_softcap: float | None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Soft-capped where the model says so."""
        cap = self.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
