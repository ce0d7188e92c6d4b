"""Query and K/V head counts, head sizes, and families beyond Llama: equal to the library's eager logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_runner import needs_avx512_bf16
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from transformers import GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from moonpool.core.errors import ConfigError


def assert_equal_to_the_library(directory: Path) -> None:
    engine = load_tiny(directory, poison=True)
    ids = [random_ids(n, seed=n) for n in (50, 17, 33)]
    got = Runner(engine).run([seq[:9] for seq in ids], 8, chunk=lambda start: 5, forced=[seq[9:17] for seq in ids])
    for one, seq in zip(got, ids, strict=True):
        torch.testing.assert_close(torch.stack(one.logits), eager_logits(directory, seq)[8:16], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 24, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (7, 1)])
def test_llama_with(heads: int, kv_heads: int, head_dim: int, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=128,
    )
    assert_equal_to_the_library(save_tiny(tmp_path, config))


@needs_avx512_bf16
@pytest.mark.parametrize("size", ["head_dim 24", "head_dim 80", "hidden_size 40", "intermediate_size 40"])
def test_sizes_that_are_not_compiled_are_refused_by_name_and_served_by_another_backend(size: str, tmp_path: Path) -> None:
    name, number = size.split()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32, name: int(number)}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=64)
    save_tiny(tmp_path, config)
    unit = 32 if name == "head_dim" else 16
    with pytest.raises(ConfigError, match=f"engine.backend: 'compiled'.*{size} is not a multiple of {unit}; use auto"):
        load_tiny(tmp_path, dtype="bfloat16", backend="compiled")
    assert load_tiny(tmp_path, dtype="bfloat16").backend_name == "fused"


MOE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
        MixtralConfig(**MOE, num_local_experts=4, sliding_window=None),
        Qwen3MoeConfig(**MOE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda config: str(config.model_type),
)
def test_family(config: PreTrainedConfig, tmp_path: Path) -> None:
    assert_equal_to_the_library(save_tiny(tmp_path, config))
