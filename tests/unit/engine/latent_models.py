"""Tiny configurations of models with multi-head latent attention: every choice that their classes know."""

from __future__ import annotations

from engine_runner import VOCAB
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
DENSE = {**SHAPE, "first_k_dense_replace": 2}
GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0}
LATENT: dict[str, PreTrainedConfig] = {
    "v2, queries in one step, yarn, dense": DeepseekV2Config(**DENSE, q_lora_rank=None, rope_parameters=YARN),
    "v2, queries by a latent of their own, experts in groups": DeepseekV2Config(
        **SHAPE, q_lora_rank=20, topk_method="group_limited_greedy", **GROUPS
    ),
    "v2, yarn, biases, experts": DeepseekV2Config(**SHAPE, q_lora_rank=20, attention_bias=True, rope_parameters=YARN),
    "v3, yarn, pairs": DeepseekV3Config(**SHAPE, q_lora_rank=20, rope_parameters=YARN, **GROUPS),
    "v3, halves, dense": DeepseekV3Config(**DENSE, q_lora_rank=None, rope_interleave=False, **GROUPS),
}
