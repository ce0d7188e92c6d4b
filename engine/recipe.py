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

In a layer with experts the MLP's last line is instead::

    p = softmax(m @ router.T)                             float32, and only the top_k of each token count
    p = p / sum of those                                  where they are normalised
    e = sum of p[i] * (activation(gate[i]) * up[i]) @ down[i].T, each with gate[i], up[i] = split(m @ gate_up[i].T)
    x = x + e                                             where there is no dense part
    x = x + e + sigmoid(m @ dense_gate.T) * dense         else, ``dense`` being the MLP from above

then ``head @ norm(x, final_norm)``, soft-capped where the model says so. ``norm(x, w)`` is x / rms(x) * w; families whose
norm multiplies by 1 + w have that 1 added to their weights here. A norm or bias that a family lacks is None, and skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from moonpool.engine.low_rank import LowRanks

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Projection:
    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None = None  # [outputs]
    low_ranks: LowRanks | None = None  # what adapters add

    def let_go(self) -> None:
        """A packed copy takes the place of the weight, whose memory is free at once."""
        self.weight.data = self.weight.new_empty(0)


@dataclass(frozen=True, slots=True)
class Rotary:
    """``cos`` and ``sin`` float32 [max_context, head_dim / 2], scaled as the family's rope kind asks for."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which each token goes through a few (Shazeer et al., "Outrageously Large Neural Networks", section 2)."""

    router: torch.Tensor  # [experts, hidden]
    top_k: int
    normalised: bool  # the weights of a token's experts sum to 1
    gate_up: torch.Tensor  # [experts, 2 * width, hidden], gate before up
    down: torch.Tensor  # [experts, hidden, width]
    dense_gate: Projection | None = None  # [1, hidden], of the dense part of the layer where there is one

    def let_go(self) -> None:
        """Packed copies take the place of the weights, whose memory is free at once."""
        self.gate_up.data = self.gate_up.new_empty(0)
        self.down.data = self.down.new_empty(0)


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor  # float32, as all norms: [hidden], query_norm and key_norm [head_dim]
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Projection
    after_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Projection | None  # None: experts alone, as ``down``
    down: Projection | None
    after_mlp_norm: torch.Tensor | None
    window: int | None  # keys a query sees, itself included
    rotary: int  # index into ``Recipe.rotaries``
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """Weights in the dtype of the model, norms in float32."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of layers without experts; 0 where there are none
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
