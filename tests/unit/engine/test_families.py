"""Known families computed without their modules: equal to the library, or left to the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from known_families import KNOWN, NO_HEAD_DIM, SHAPE
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GlmConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from moonpool.core.errors import ConfigError
from moonpool.engine import attention
from moonpool.engine.compiled.cpu import unfit_cpu
from moonpool.engine.families import known, recipe_of

UNKNOWN: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "multipliers": GraniteConfig(
        **NO_HEAD_DIM, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_scaling=2.0
    ),
    "merged projections": Phi3Config(**NO_HEAD_DIM, pad_token_id=0),
    "partly turned heads": GlmConfig(**SHAPE, pad_token_id=0),
    "another activation": LlamaConfig(**SHAPE, hidden_act="relu"),
}


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
