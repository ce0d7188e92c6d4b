"""Known families computed without their modules: equal to the library, or left to the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GlmConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from moonpool.core.errors import ConfigError
from moonpool.engine import attention
from moonpool.engine.compiled.cpu import unfit_cpu
from moonpool.engine.families import known, recipe_of

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
NO_HEAD_DIM = {**SHAPE, "hidden_size": 96}
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
    "mistral": MistralConfig(**{**SHAPE, "head_dim": 24}, sliding_window=20),
    "qwen2": Qwen2Config(**NO_HEAD_DIM, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": Qwen3Config(**{**SHAPE, "head_dim": 32}, attention_bias=True),
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
UNKNOWN: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "multipliers": GraniteConfig(
        **NO_HEAD_DIM, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0
    ),
    "merged projections": Phi3Config(**NO_HEAD_DIM, pad_token_id=0),
    "partly turned heads": GlmConfig(**SHAPE, pad_token_id=0),
    "another activation": LlamaConfig(**SHAPE, hidden_act="relu"),
}
LENGTHS = (50, 21, 3)
OUTPUTS = 6


def logits_apart(directory: Path, *, dtype: str, backend: str) -> float:
    """The largest difference to float32 of the library, in chunks, in batches, with NaN wherever nobody wrote."""
    save_tiny_once(directory)
    engine = load_tiny(directory, poison=True, dtype=dtype, backend=backend)
    assert engine.backend_name == backend
    ids = [random_ids(n + OUTPUTS, seed=n) for n in LENGTHS]
    prompts = [seq[:n] for seq, n in zip(ids, LENGTHS, strict=True)]
    forced = [seq[n:] for seq, n in zip(ids, LENGTHS, strict=True)]
    worst = 0.0
    for chunk in (1 << 30, 13, 1):
        got = Runner(engine).run(prompts, OUTPUTS, chunk=lambda start, size=chunk: size, forced=forced)  # type: ignore[misc]
        for one, seq, n in zip(got, ids, LENGTHS, strict=True):
            worst = max(worst, float((torch.stack(one.logits) - eager_logits(directory, seq)[n - 1 : -1]).abs().max()))
    engine.close()
    return worst


def save_tiny_once(directory: Path) -> None:
    if not (directory / "config.json").exists():
        save_tiny(directory, KNOWN[directory.name])


@pytest.mark.parametrize("kind", KNOWN)
def test_a_known_family_without_its_module_equals_the_library(kind: str, tmp_path: Path) -> None:
    assert logits_apart(tmp_path / kind, dtype="float32", backend="fused") < 2e-5


@pytest.mark.parametrize("kind", ["llama with biases and one table", "qwen3", "gemma2", "qwen3_moe"])
def test_bfloat16_is_as_near_to_float32_as_the_module(kind: str, tmp_path: Path) -> None:
    directory = tmp_path / kind
    module = logits_apart(directory, dtype="bfloat16", backend="torch")
    assert logits_apart(directory, dtype="bfloat16", backend="fused") < 1.5 * module + 0.01


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_model_that_is_built_otherwise_is_left_to_its_module(kind: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, UNKNOWN[kind])
    engine = load_tiny(tmp_path, poison=True)
    assert engine.backend_name == "torch"
    assert "fused" in engine.backend_note
    ids = random_ids(40, seed=1)
    got = Runner(engine).run([ids[:30]], 10, chunk=lambda start: 13, forced=[ids[30:]])[0]
    torch.testing.assert_close(torch.stack(got.logits), eager_logits(tmp_path, ids)[29:-1], atol=3e-5, rtol=1e-5)


class _Louder(LlamaMLP):  # type: ignore[misc]  # the library is untyped
    """What a plug-in might put into a model."""


def _fresh() -> LlamaForCausalLM:
    attention.register()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation=attention.NAME)
    assert isinstance(model, LlamaForCausalLM)
    return model.eval()


@pytest.mark.parametrize("changed", ["mlp", "activation", "eps", "dtype", "more", "whole"])
def test_one_changed_part_makes_a_model_unknown(changed: str) -> None:
    model = _fresh()
    assert known(model)
    layer = model.model.layers[1]
    match changed:
        case "mlp":
            layer.mlp.__class__ = _Louder
        case "activation":
            layer.mlp.act_fn = nn.GELU()
        case "eps":
            layer.input_layernorm.variance_epsilon = 1e-3
        case "dtype":
            layer.self_attn.q_proj.bfloat16()
        case "more":
            layer.self_attn.gate = nn.Linear(48, 48)
        case "whole":
            model.__class__ = type("Tuned", (LlamaForCausalLM,), {})
    assert not known(model)
    assert recipe_of(model, 64) is None


@pytest.mark.parametrize("changed", ["router", "experts", "bias", "activation", "more"])
def test_one_changed_part_makes_a_model_with_experts_unknown(changed: str) -> None:
    attention.register()
    model: Any = AutoModelForCausalLM.from_config(KNOWN["qwen3_moe"], attn_implementation=attention.NAME).eval()
    assert known(model)
    block = model.model.layers[1].mlp
    match changed:
        case "router":
            block.gate.__class__ = type("Noisy", (type(block.gate),), {})
        case "experts":
            block.experts.__class__ = type("Louder", (type(block.experts),), {})
        case "bias":
            block.experts.up_bias = nn.Parameter(torch.zeros(6, 48))
        case "activation":
            block.experts.act_fn = nn.GELU()
        case "more":
            block.shared_expert = nn.Linear(48, 48)
    assert not known(model)


def test_experts_are_not_compiled_and_the_reason_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path, KNOWN["qwen3_moe"])
    engine = load_tiny(tmp_path, dtype="bfloat16")
    assert engine.backend_name == "fused"
    if unfit_cpu() is None:
        assert engine.backend_note == "not compiled: the model has layers of experts, it computes dense MLPs"
        with pytest.raises(ConfigError, match=r"engine.backend: 'compiled'.*layers of experts.*use auto"):
            load_tiny(tmp_path, dtype="bfloat16", backend="compiled")


def test_merged_projections_leave_no_second_copy_behind() -> None:
    model = _fresh()
    layer = model.model.layers[0]
    parts = [getattr(layer.self_attn, f"{name}_proj").weight.detach().clone() for name in "qkv"]
    recipe = recipe_of(model, 64)
    assert recipe is not None
    assert torch.equal(recipe.layers[0].qkv.weight, torch.cat(parts))
    assert [layer.self_attn.q_proj.weight, layer.mlp.up_proj.weight] == [None, None]
    assert recipe.layers[0].down.weight.data_ptr() == layer.mlp.down_proj.weight.data_ptr()
