"""Models the engine does not compute rightly are refused at load, and the refusal names the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from engine_runner import VOCAB, load_tiny, save_tiny

from moonpool.core.errors import UnsupportedModel

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("MiniCPM3", LATENT, "latent attention"),
        ("GptOss", {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}, "s_aux"),
        ("Bert", SMALL, "not causal|not a decoder-only"),
        ("Mamba", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "linear_attention"),
        ("Bloom", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "position_ids"),
        ("Bart", {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}, "bart|Bart"),
        (
            "Qwen2Moe",
            {
                **SMALL,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "use_sliding_window": True,
                "sliding_window": 32,
                "max_window_layers": 2,
            },
            "layer 0 of 'qwen2_moe' is a sliding window layer but does not say its window",
        ),
        ("DiffLlama", SMALL, "calls its attention function"),
    ],
)
def test_is_refused(kind: str, values: dict[str, object], reason: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**values)
    save_tiny(tmp_path, config)
    with pytest.raises(UnsupportedModel, match=reason):
        load_tiny(tmp_path, context=64 if kind in ("Mamba", "Bloom") else 0)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"T5ForConditionalGeneration.*not a decoder-only"):
        load_tiny(tmp_path)


def test_chunked_attention_is_refused(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(**SMALL, num_local_experts=1, intermediate_size_mlp=32, head_dim=8, moe_layers=[])
    save_tiny(tmp_path, config)
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        load_tiny(tmp_path)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL)
    save_tiny(tmp_path, config)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("{", '{"quantization_config": {"quant_method": "gptq", "bits": 4},', 1))
    with pytest.raises(UnsupportedModel, match="quantized"):
        load_tiny(tmp_path)
