"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) in place of the library's own, which expands every latent
into keys and values of all heads: ours keeps the latents themselves in pages, and attends to them in absorbed form.

A head's key is ``up_k @ c`` beside the rotated key r that all heads share, and its value ``up_v @ c``. So ``q . (up_k @ c)`` is
``(q @ up_k) . c``, and what the softmax weighs are latents: ``up_v`` is applied once to their mean. Nothing else of the model
changes: projections, norms, rotary embedding (yarn's scale in it) and the scale of scores are those of its own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from moonpool.engine.attention import LatentCall, Step
from moonpool.engine.refusals import refuse

Rotate = Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
"""Rotary parts of queries [1, heads, tokens, rope] and of the key [1, 1, tokens, rope], with what the model's rotary
embedding made of the positions."""


class LatentAttention(torch.nn.Module):
    """Takes the place of one attention module of the library, whose projections and norms it uses."""

    def __init__(self, of: torch.nn.Module, rotate: Rotate) -> None:
        super().__init__()
        self.of = of
        self._rotate = rotate

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        position_embeddings: Any = None,
        moonpool_step: Step | None = None,
        **_library: object,
    ) -> tuple[torch.Tensor, None]:
        of: Any = self.of
        if moonpool_step is None:
            raise refuse(f"{type(of).__name__} is called without a step: its layers do not pass keyword arguments on")
        x, tokens, rank = hidden_states[0], hidden_states.shape[1], of.kv_lora_rank
        query = of.q_proj(x) if of.q_lora_rank is None else of.q_b_proj(of.q_a_layernorm(of.q_a_proj(x)))
        query = query.view(tokens, of.num_heads, -1).transpose(0, 1)
        plain, turning = query.split([of.qk_nope_head_dim, of.qk_rope_head_dim], 2)
        compressed, key = of.kv_a_proj_with_mqa(x).split([rank, of.qk_rope_head_dim], 1)
        turned, key = self._rotate(turning[None], key[None, None], position_embeddings)
        up = of.kv_b_proj.weight.view(of.num_heads, of.qk_nope_head_dim + of.v_head_dim, rank)
        call = LatentCall(
            query_latent=torch.bmm(plain, up[:, : of.qk_nope_head_dim]),
            query_rope=turned[0],
            latent=torch.cat((of.kv_a_layernorm(compressed), key[0, 0]), dim=1),
            scaling=of.scaling,
        )
        mean = moonpool_step.attend_latent(of.layer_idx, call).transpose(0, 1)  # [heads, tokens, kv_lora_rank]
        values = torch.bmm(mean, up[:, of.qk_nope_head_dim :].transpose(1, 2))
        return of.o_proj(values.transpose(0, 1).reshape(1, tokens, -1)), None


def _rotate_v2(query: torch.Tensor, key: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    turned: tuple[torch.Tensor, torch.Tensor] = v2.apply_rotary_emb(query, key, angles)
    return turned


def _rotate_v3_pairs(query: torch.Tensor, key: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    turned: tuple[torch.Tensor, torch.Tensor] = v3.apply_rotary_pos_emb_interleave(query, key, *angles)
    return turned


def _rotate_v3_halves(query: torch.Tensor, key: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    turned: tuple[torch.Tensor, torch.Tensor] = v3.apply_rotary_pos_emb(query, key, *angles)
    return turned


def page_latents(model: torch.nn.Module) -> None:
    """Replace every attention module of ``model``. UnsupportedModel where one is of no class known here."""
    root: Any = model
    for number, layer in enumerate(root.model.layers):
        of = layer.self_attn
        if type(of) is v2.DeepseekV2Attention:
            rotate: Rotate = _rotate_v2
        elif type(of) is v3.DeepseekV3Attention:
            rotate = _rotate_v3_pairs if of.config.rope_interleave else _rotate_v3_halves
        else:
            raise refuse(f"layer {number} has latent attention of class {type(of).__name__}, which is not implemented")
        layer.self_attn = LatentAttention(of, rotate)
