"""Rotary embeddings: equal to the library's logits, or refused at load; never ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from moonpool.core.errors import UnsupportedModel

ORIGINAL = 64
LONG, SHORT = [2.0 + i / 4 for i in range(8)], [1.0 + i / 8 for i in range(8)]
KINDS: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "long_factor": LONG, "short_factor": SHORT},
}
BY_LENGTH = ("dynamic", "longrope")


def checkpoint(tmp_path: Path, kind: str, *, old_names: bool) -> Path:
    """``old_names``: rope_scaling with ``type`` and a rope_theta beside it, as checkpoints before transformers 5 have them."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=ORIGINAL if kind == "dynamic" else 4 * ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]},
    )
    save_tiny(tmp_path, config)
    if old_names:
        raw = json.loads((tmp_path / "config.json").read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = None if kind == "default" else {"type": rope.pop("rope_type"), **rope}
        (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_library(kind: str, old_names: bool, tmp_path: Path) -> None:
    checkpoint(tmp_path, kind, old_names=old_names)
    longest = ORIGINAL if kind in BY_LENGTH else 200
    engine = load_tiny(tmp_path, context=longest)
    for length in (n for n in (32, 64, 65, 200) if n <= longest):
        ids = random_ids(length, seed=length)
        want = eager_logits(tmp_path, ids)
        got = Runner(engine).run([ids[:20]], length - 20, forced=[ids[20:]])[0]
        torch.testing.assert_close(torch.stack(got.logits), want[19:-1], atol=2e-5, rtol=1e-5)
        got = Runner(engine).run([ids], 1, chunk=lambda start: 16)[0]
        torch.testing.assert_close(got.logits[0], want[-1], atol=2e-5, rtol=1e-5)


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "mistral": partial(MistralConfig, **SHAPE, sliding_window=32),
    "qwen2": partial(Qwen2Config, **SHAPE),
    "qwen3": partial(Qwen3Config, **SHAPE, head_dim=16),
    "qwen3_moe": partial(Qwen3MoeConfig, **SHAPE, head_dim=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "gemma2": partial(Gemma2Config, **SHAPE, head_dim=16, sliding_window=32),
    "gemma3": partial(
        Gemma3TextConfig, **SHAPE, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_the_library_with(family: str, kind: str, tmp_path: Path) -> None:
    """Of Gemma-3 the full layers turn by ``kind``, the windowed ones as they always do."""
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]}
    if family == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0}}
    longest = ORIGINAL if kind in BY_LENGTH else 200
    most = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    save_tiny(tmp_path, FAMILIES[family](max_position_embeddings=most, rope_parameters=rope))
    engine = load_tiny(tmp_path, context=longest)
    assert engine.backend_name == "fused"
    ids = random_ids(longest, seed=longest)
    want, at = eager_logits(tmp_path, ids), longest - 31  # those behind come one by one
    got = Runner(engine).run([ids[:at]], longest - at, chunk=lambda start: 16, forced=[ids[at:]])[0]
    torch.testing.assert_close(torch.stack(got.logits), want[at - 1 : -1], atol=3e-5, rtol=1e-5)
    if longest > ORIGINAL + 1:  # a chunk that lies beyond
        got = Runner(engine).run([ids], 1, chunk=lambda start: 65)[0]
        torch.testing.assert_close(got.logits[0], want[-1], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_kinds_that_switch_with_length_are_refused_beyond_it(kind: str, old_names: bool, tmp_path: Path) -> None:
    checkpoint(tmp_path, kind, old_names=old_names)
    if kind == "dynamic":  # such checkpoints state their stretched length
        raw = json.loads((tmp_path / "config.json").read_text())
        raw["max_position_embeddings"] = 4 * ORIGINAL
        rope = raw["rope_scaling" if old_names else "rope_parameters"]
        rope["original_max_position_embeddings"] = ORIGINAL
        (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match=f"'{kind}'.*set model.max_context to 64 or less"):
        load_tiny(tmp_path)


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "default", old_names=False)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_parameters"]["rope_type"] = "spiral"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="spiral"):
        load_tiny(tmp_path)
