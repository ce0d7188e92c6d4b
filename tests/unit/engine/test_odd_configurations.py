"""Fields of config.json that are wrong, and weights that do not go with it: the start ends with the field's name and a fix."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from moonpool.core.config import Config, ModelConfig
from moonpool.core.errors import UnsupportedModel
from moonpool.engine import trial
from moonpool.engine.engine import load_engine

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FACTORS = {"long_factor": [2.0 + i / 4 for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
LATENT = {
    **{name: size for name, size in SHAPE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=32),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "deepseek_v2": DeepseekV2Config(**LATENT),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_tiny(tmp_path_factory.mktemp(kind), config) for kind, config in CONFIGS.items()}


def changed(source: Path, target: Path, **fields: object) -> Path:
    for file in source.iterdir():
        if file.is_file():
            (target / file.name).symlink_to(file)
    config = target / "config.json"
    raw = json.loads(config.read_text()) | fields
    config.unlink()
    config.write_text(json.dumps(raw))
    return target


WRONG: list[tuple[str, dict[str, object], str]] = [
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, 1 token or more is needed"),
    ("mistral", {"sliding_window": -1}, "sliding_window is -1, 1 token or more is needed"),
    ("gemma2", {"sliding_window": 0}, "sliding_window is 0, 1 token or more is needed"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0, a positive number or null"),
    ("gemma2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping is -50.0, a positive number or null"),
    ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0, a positive number or null"),
    ("gemma2", {"final_logit_softcapping": math.nan}, "final_logit_softcapping is nan, a positive number or null"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "does not load as 'gemma2'"),
    ("gemma2", {"query_pre_attn_scalar": -1}, "multiplies its scores by .*wrong query_pre_attn_scalar"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, a positive number is needed"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings is 0, a positive number is needed"),
    ("llama", {"pad_token_id": 999}, "does not load as 'llama': Padding_idx"),
    ("llama", {"architectures": 3}, "architectures is 3, a list of class names"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', a list of class names"),
    (
        "llama",
        {"architectures": ["MistralForCausalLM"]},
        "'MistralForCausalLM' is not .* of model_type 'llama', which is 'LlamaForCausalLM'",
    ),
    ("llama", {"rms_norm_eps": math.nan}, "computes what is no number"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "computes what is no number"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "4"}}, "does not load as 'llama'"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", **FACTORS}, "original_max_position_embeddings": 64},
        "'longrope' changes all angles beyond 64 tokens",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": "64"}},
        "original_max_position_embeddings is '64', a number of tokens",
    ),
    ("llama", {"rope_parameters": {"rope_type": ["linear"], "rope_theta": 1e4}}, r"rope type \['linear'\] is unknown"),
    ("llama", {"rope_parameters": None, "rope_scaling": {"factor": 4.0}}, "say factor 4.0, but no rope_type"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
        "say type 'dynamic', and rope_type is 'linear'",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and 'llama' turns whole heads"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}},
        "hold some for 'full_attention' alone, which 'llama' looks at for no layer",
    ),
    (
        "gemma3",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "say type 'linear', and rope_type",
    ),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "spiral"}}, "say type 'spiral', and rope_type"),
    ("gemma3", {"rope_parameters": None, "rope_scaling": {"factor": 8.0}}, "say factor 8.0, but no rope_type"),
    (
        "gemma3",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "sliding_attention": {"rope_type": "default"}}},
        "hold some for 'sliding_attention' alone.*beside",
    ),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, a positive number is needed"),
    ("deepseek_v2", {"topk_method": None}, "does not compute a flattened batch"),
]


@pytest.mark.parametrize(("kind", "fields", "reason"), WRONG, ids=[f"{kind} {fields}" for kind, fields, _ in WRONG])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_field_that_is_wrong_is_named(
    kind: str, fields: dict[str, object], reason: str, backend: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=f"^model.path: .*{reason}.*; (correct|fetch|use|set)"):
        load_tiny(changed(saved[kind], tmp_path, **fields), backend=backend)


def test_a_layer_type_that_the_librarys_class_does_not_look_at_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "whole", MixtralConfig(**SHAPE, num_local_experts=2, sliding_window=32))
    (tmp_path / "changed").mkdir()
    directory = changed(tmp_path / "whole", tmp_path / "changed", layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedModel, match=r"layer_types says 'full_attention' of layer 0.*window of 32"):
        load_tiny(directory)


def test_mistral_with_layer_types_is_computed_by_them(saved: dict[str, Path], tmp_path: Path) -> None:
    """The library reads it as another model_type, whose class its checkpoints do not name."""
    directory = changed(saved["mistral"], tmp_path, layer_types=["full_attention", "sliding_attention"])
    ids = random_ids(60, seed=1)
    want = eager_logits(directory, ids)
    assert float((want - eager_logits(saved["mistral"], ids))[40:].abs().max()) > 1e-3
    got = Runner(load_tiny(directory, poison=True)).run([ids[:50]], 10, chunk=lambda start: 13, forced=[ids[50:]])[0]
    torch.testing.assert_close(torch.stack(got.logits), want[49:-1], atol=3e-5, rtol=1e-5)


def test_no_expert_for_a_token_is_left_to_the_module(saved: dict[str, Path], tmp_path: Path) -> None:
    directory = changed(saved["qwen3_moe"], tmp_path, num_experts_per_tok=0)
    engine = load_tiny(directory)
    assert engine.backend_name == "torch"
    ids = random_ids(20, seed=1)
    got = Runner(engine).run([ids], 1)[0]
    torch.testing.assert_close(got.logits[0], eager_logits(directory, ids)[-1], atol=3e-5, rtol=1e-5)


def retensored(source: Path, target: Path, **tensors: torch.Tensor) -> Path:
    changed(source, target)
    file = target / "model.safetensors"
    held = load_file(file) | tensors
    file.unlink()
    save_file(held, file, metadata={"format": "pt"})
    return target


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    "name", [f"{LAYER}.self_attn.k_proj.bias", f"{LAYER}.mlp.up_proj.weight_scale_inv", f"{LAYER}.input_layernorm.bias"]
)
def test_a_tensor_of_a_layer_that_is_computed_without_it_is_refused(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """A bias that config.json switches off, or the scales of a quantised checkpoint that does not say so."""
    directory = retensored(saved["llama"], tmp_path, **{name: torch.ones(32)})
    with pytest.raises(UnsupportedModel, match=rf"{name}.*is of a layer that is computed without it.*; fetch"):
        load_tiny(directory)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [f"{LAYER}.self_attn.v_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_refused(where: str, bad: float, saved: dict[str, Path], tmp_path: Path) -> None:
    """Those of an embedding that the first look does not meet are found by the trial."""
    whole = load_file(saved["llama"] / "model.safetensors")[where]
    (whole[1:] if "embed" in where else whole).fill_(bad)
    directory = retensored(saved["llama"], tmp_path, **{where: whole})
    with pytest.raises(UnsupportedModel, match=r"no number.*; fetch"):
        load_tiny(directory)


def test_a_trial_that_the_module_fails_is_no_agreement() -> None:
    nothing = torch.full((1, 4), math.nan)
    with pytest.raises(UnsupportedModel, match="no number"):
        trial.disagreement(nothing, nothing, None)  # type: ignore[arg-type]


def test_a_refusal_of_ours_passes_through_the_librarys_calls(saved: dict[str, Path], tmp_path: Path) -> None:
    directory = changed(saved["deepseek_v2"], tmp_path, scoring_func="sigmoid")
    with pytest.raises(UnsupportedModel, match=r"^model.path: config.json: scoring_func"):
        load_engine(Config(model=ModelConfig(path=str(directory))), directory, threads=1, pages=4)
