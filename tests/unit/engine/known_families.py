"""Tiny configurations of every family that has a recipe, of sizes that all backends compute."""

from __future__ import annotations

from engine_runner import VOCAB
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
NO_HEAD_DIM = {**SHAPE, "hidden_size": 192}
NO_HEAD_DIM.pop("head_dim")
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LOCAL_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}
KNOWN: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama with biases and one table": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama with yarn": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "mistral": MistralConfig(**SHAPE, sliding_window=20),
    "qwen2": Qwen2Config(**NO_HEAD_DIM, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, attention_bias=True),
    "gemma": GemmaConfig(**{**SHAPE, "num_key_value_heads": 1}),
    "gemma2": Gemma2Config(
        **SHAPE, sliding_window=20, layer_types=MIXED, query_pre_attn_scalar=24, final_logit_softcapping=4.0
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE, sliding_window=20, layer_types=MIXED, query_pre_attn_scalar=24, rope_parameters=LOCAL_GLOBAL
    ),
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
KNOWN |= {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe with dense layers and weights as they are": Qwen3MoeConfig(
        **{**SHAPE, "num_hidden_layers": 4}, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1], decoder_sparse_step=2
    ),
    "qwen2_moe": Qwen2MoeConfig(**NO_HEAD_DIM, **EXPERTS, shared_expert_intermediate_size=32, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
}
