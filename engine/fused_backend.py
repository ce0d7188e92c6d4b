"""A recipe computed with PyTorch's kernels: any CPU, any dtype, with no module and hardly any Python between the kernels.

Linears of bfloat16 keep their weights as oneDNN blocks them, which saves a reorder in every step; a build of PyTorch
without that falls back to plain linears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from moonpool.engine.attention import AttentionCall, Step
from moonpool.engine.backends import Hook, Span
from moonpool.engine.linears import Linear, linear_of
from moonpool.engine.mlps import Mlp, mlp_of
from moonpool.engine.page_tensor import PageTensor, sent
from moonpool.engine.recipe import Layer, Recipe, Rotary
from moonpool.engine.torch_backend import MakeStep, TorchStep

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, hidden]: one rank's part of what all ranks add, to the sum of all. The result is the caller's."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of the recipe whose projections have become callables."""

    of: Layer
    qkv: Linear
    out: Linear
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class _Turn:
    """What rotates the heads of one step: [tokens, 1, head_dim] each, the sine negative in its first half."""

    cos: torch.Tensor
    sin: torch.Tensor


class FusedBackend:
    name = "fused"

    def __init__(
        self, recipe: Recipe, memory: PageTensor, make_step: MakeStep = TorchStep, reduce: Reduce | None = None
    ) -> None:
        """``recipe`` gives its projections away: they are packed here, layer by layer. ``reduce``: it is one rank's share of a
        model, which is called with what attention and then MLP of each layer add here, for what they add everywhere."""
        self._recipe = recipe
        self._memory = memory
        self._make_step = make_step
        self._head = linear_of(recipe.head, keep=recipe.head.weight is recipe.embedding)
        self._layers = [
            _Layer(
                one,
                linear_of(one.qkv),
                _everywhere(linear_of(one.out), reduce),
                _everywhere(mlp_of(one, recipe.activation), reduce),
            )
            for one in recipe.layers
        ]
        self._turns = [_table(rotary, recipe.dtype) for rotary in recipe.rotaries]

    def forward(
        self,
        ids: NDArray[np.int64],
        spans: Sequence[Span],
        wanted: Sequence[int],
        before_layer: Hook | None,
        on_layer: Hook | None,
    ) -> torch.Tensor:
        x = self.through_layers(self.embedded(ids), spans, before_layer, on_layer)
        return self._recipe.capped(self.logits(x, wanted))

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """[tokens, vocabulary] of all tokens, whose ``ids`` and ``positions`` are int64 on the device: nothing here waits."""
        x = self._layered(self._embedded(ids), positions, step)
        return self._recipe.capped(self._head(self._norm(x, self._recipe.final_norm)))

    def embedded(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """[tokens, hidden]."""
        return self._embedded(sent(ids, self._memory.device))

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        recipe = self._recipe
        x = functional.embedding(ids, recipe.embedding)
        return x if recipe.embedding_scale == 1.0 else x * recipe.embedding_scale

    def through_layers(
        self, x: torch.Tensor, spans: Sequence[Span], before_layer: Hook | None, on_layer: Hook | None
    ) -> torch.Tensor:
        """[tokens, hidden] behind the last layer."""
        step = self._make_step(self._memory, spans, before_layer, on_layer)
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        return self._layered(x, sent(positions, self._memory.device), step)

    def _layered(self, x: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        turns = [_Turn(cos[positions][:, None], sin[positions][:, None]) for cos, sin in self._turns]
        for index, layer in enumerate(self._layers):
            x = self._attend(x, index, layer, turns[layer.of.rotary], step)
            x = self._think(x, layer)
        return x

    def logits(self, x: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
        """[len(wanted), rows of the head], not capped yet."""
        last = x[sent(np.array(wanted, dtype=np.int64), self._memory.device)]
        return self._head(self._norm(last, self._recipe.final_norm))

    def close(self) -> None:
        del self._recipe, self._memory, self._layers, self._head, self._turns

    def _attend(self, x: torch.Tensor, index: int, layer: _Layer, turn: _Turn, step: Step) -> torch.Tensor:
        """[tokens, hidden]: ``x`` and what attention adds to it."""
        recipe, of = self._recipe, layer.of
        both = recipe.heads + recipe.kv_heads
        qkv = layer.qkv(self._norm(x, of.attention_norm)).view(len(x), -1, recipe.head_dim)
        turned = _rotate(self._head_norms(qkv[:, :both], of), turn).transpose(0, 1)  # [heads + kv_heads, tokens, head_dim]
        call = AttentionCall(
            query=turned[: recipe.heads],
            key=turned[recipe.heads :],
            value=qkv[:, both:].transpose(0, 1),
            scaling=recipe.scaling,
            window=of.window,
            softcap=recipe.attention_softcap,
            causal=True,
            extra=(),
        )
        attended = step.attend(index, call).reshape(len(x), -1)
        if of.after_attention_norm is None:
            return layer.out.added(attended, x)
        return x + self._norm(layer.out(attended), of.after_attention_norm)

    def _head_norms(self, heads: torch.Tensor, of: Layer) -> torch.Tensor:
        if of.query_norm is None or of.key_norm is None:
            return heads
        query, key = heads[:, : self._recipe.heads], heads[:, self._recipe.heads :]
        return torch.cat((self._norm(query, of.query_norm), self._norm(key, of.key_norm)), dim=1)

    def _think(self, x: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """[tokens, hidden]: ``x`` and what the MLP adds to it."""
        of = layer.of
        m = self._norm(x, of.mlp_norm)
        if of.after_mlp_norm is None:
            return layer.mlp.added(m, x)
        return x + self._norm(layer.mlp(m), of.after_mlp_norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In float32 whatever the dtype of ``x``, as the library's modules do."""
        return functional.rms_norm(x.float(), weight.shape, weight, self._recipe.eps).to(x.dtype)


class _Everywhere:
    """What ``part`` adds, of all ranks together."""

    def __init__(self, part: Linear, reduce: Reduce) -> None:
        self._part, self._reduce = part, reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(self._part(x))

    def added(self, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return self(x).add_(to)


def _everywhere(part: Linear, reduce: Reduce | None) -> Linear:
    return part if reduce is None else _Everywhere(part, reduce)


def _table(rotary: Rotary, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [max_context, head_dim] for ``_rotate``."""
    cos = torch.cat((rotary.cos, rotary.cos), dim=1).to(dtype)
    return cos, torch.cat((-rotary.sin, rotary.sin), dim=1).to(dtype)


def _rotate(heads: torch.Tensor, turn: _Turn) -> torch.Tensor:
    """[tokens, heads, head_dim]: element i turned with element i + head_dim / 2."""
    return torch.addcmul(heads * turn.cos, heads.roll(heads.shape[2] // 2, 2), turn.sin)
