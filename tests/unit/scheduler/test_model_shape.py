from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.errors import ConfigError
from moonpool.scheduler.model_shape import shape_of

LLAMA_70B: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures/llama-3-70b/config.json").read_text())
LLAMA_8B = LLAMA_70B | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
QWEN3_8B = LLAMA_8B | {"intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128, "vocab_size": 151936}
QWEN3_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [(LLAMA_70B, 327_680), (LLAMA_8B, 131_072), (QWEN3_8B, 147_456), (QWEN3_235B, 192_512), (DEEPSEEK_V3, 70_272)],
    ids=["llama-3-70b", "llama-3-8b", "qwen3-8b", "qwen3-235b", "deepseek-v3"],
)
def test_kv_bytes_per_token_are_the_published_ones(config: dict[str, Any], kv_bytes: int) -> None:
    assert shape_of(config).kv_bytes == kv_bytes


def test_llama_3_70b_has_the_published_weights_and_flops() -> None:
    shape = shape_of(LLAMA_70B, "llama")
    assert shape.name == "llama"
    assert shape.kv_bytes * 131_072 == pytest.approx(42.9e9, rel=0.002)
    assert shape.weight_bytes == pytest.approx(141e9, rel=0.01)
    assert shape.linear_flops == pytest.approx(25.5 * 8192**2 * 80, rel=0.001)
    assert shape.attention_flops == 4 * 8192 * 80


def test_models_with_experts_have_all_their_weights_and_compute_with_few() -> None:
    qwen, deepseek = shape_of(QWEN3_235B), shape_of(DEEPSEEK_V3)
    assert qwen.weight_bytes / 2 == pytest.approx(235e9, rel=0.01)
    assert qwen.linear_flops / 2 == pytest.approx(22e9, rel=0.06)  # active, embeddings left out
    assert deepseek.weight_bytes == pytest.approx(671e9, rel=0.01)
    assert deepseek.linear_flops / 2 == pytest.approx(37e9, rel=0.04)


def test_a_larger_batch_reads_more_experts_up_to_all() -> None:
    shape = shape_of(QWEN3_235B)
    read = [shape.read_bytes(batch) for batch in (1, 2, 16, 1_000)]
    assert read == sorted(read)
    assert read[0] == pytest.approx(2 * 22e9, rel=0.06)
    assert read[-1] == pytest.approx(shape.weight_bytes)
    assert shape_of(LLAMA_70B).read_bytes(1) == shape_of(LLAMA_70B).weight_bytes


def test_the_cache_may_have_a_type_of_its_own() -> None:
    assert shape_of(LLAMA_70B, kv_dtype="fp8").kv_bytes == 163_840
    assert shape_of(LLAMA_70B | {"torch_dtype": "float32"}).kv_bytes == 655_360


def test_models_with_pictures_keep_their_text_part_apart() -> None:
    assert shape_of({"model_type": "llava", "text_config": LLAMA_8B}).kv_bytes == 131_072


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
    ],
    ids=["missing", "a word", "no feed-forward", "unknown type", "none", "negative"],
)
def test_what_is_missing_or_wrong_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of(LLAMA_70B | change)
