"""Which checkpoints load, which are refused, and what the refusal says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from engine_runner import VOCAB, Runner, eager_logits, load_tiny, random_ids, save_tiny
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError, UnsupportedModel
from moonpool.engine.engine import load_engine
from moonpool.engine.loading import memory_budget


def llama(**changes: object) -> LlamaConfig:
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**{**values, **changes})


def rewrite(directory: Path, name: str = "config.json", **values: object) -> None:
    raw = json.loads((directory / name).read_text())
    raw.update(values)
    (directory / name).write_text(json.dumps(raw))


def assert_serves_reference_logits(directory: Path) -> None:
    ids = random_ids(40, seed=5)
    got = Runner(load_tiny(directory)).run([ids], 1, chunk=lambda start: 16)[0]
    torch.testing.assert_close(got.logits[0], eager_logits(directory, ids)[-1], atol=2e-5, rtol=1e-5)


def test_a_tied_head_without_its_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert_serves_reference_logits(tmp_path)


def test_a_tied_head_with_its_tensor(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(tie_word_embeddings=True))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_serves_reference_logits(tmp_path)


def test_an_untied_head(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(tie_word_embeddings=False))
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    assert_serves_reference_logits(tmp_path)


def test_an_untied_head_whose_tensor_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(tie_word_embeddings=True))
    rewrite(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight"):
        load_tiny(tmp_path)


def test_sharded_weights(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(), shard="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_serves_reference_logits(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(), shard="40KB")
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ConfigError, match=victim.name):
        load_tiny(tmp_path)


def test_a_shard_outside_the_directory_is_not_read(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(), shard="40KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="outside"):
        load_tiny(tmp_path)


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_tiny(tmp_path)


def test_an_unused_tensor_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, llama())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.extra.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="moonpool.engine.loaded_weights"):
        load_tiny(tmp_path)
    assert "model.layers.0.extra.weight" in caplog.text


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    rewrite(tmp_path, intermediate_size=80)
    with pytest.raises(UnsupportedModel, match=r"mlp\.\w+_proj\.weight"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=name):
        load_tiny(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x10\0\0\0\0\0\0\0{"])
def test_damaged_weights_are_an_error_and_not_a_crash(damage: bytes, tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable"):
        load_tiny(tmp_path)


def test_weights_cut_short_are_an_error_and_not_a_crash(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable.*speaks of more"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "nobody-knows"}', '{"model_type": 3}'])
def test_a_configuration_nobody_can_read_is_refused(text: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json|nobody-knows"):
        load_tiny(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    rewrite(tmp_path, model_type="own", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    with pytest.raises(UnsupportedModel):
        load_tiny(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_too_little_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    config = Config(model=ModelConfig(path=str(tmp_path), dtype="float32"), engine=EngineConfig(pages=1 << 40))
    with pytest.raises(ConfigError, match=r"1099511627776 pages.*MiB are available|of memory are available"):
        load_engine(config, tmp_path, threads=1)


def test_the_memory_budget_counts_weights_and_pages(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(tie_word_embeddings=True))
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    config = Config(engine=EngineConfig(block_tokens=16, page_bytes=1 << 20))
    budget = memory_budget(config, tmp_path)
    assert budget.weights == 2 * numbers
    assert budget.page_bytes == 2 * 2 * 2 * 16 * 16 * 2
    assert budget.pages == (1 << 20) // budget.page_bytes
    assert f"{budget.pages} pages" in str(budget)
    assert memory_budget(config, tmp_path, pages=3).needed == budget.weights + 3 * budget.page_bytes


def test_a_page_larger_than_its_memory_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(num_key_value_heads=4, head_dim=256))
    with pytest.raises(ConfigError, match=r"engine\.page_bytes"):
        load_engine(Config(engine=EngineConfig(block_tokens=512, page_bytes=1 << 20)), tmp_path, threads=1)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama())
    with pytest.raises(ConfigError, match="129 is more than the 128 tokens"):
        load_tiny(tmp_path, context=129)
    assert load_tiny(tmp_path, context=100).max_context == 100
    assert load_tiny(tmp_path).max_context == 128


def test_end_of_sequence_ids_come_from_both_files(tmp_path: Path) -> None:
    save_tiny(tmp_path, llama(eos_token_id=2))
    rewrite(tmp_path, "generation_config.json", eos_token_id=[2, 7])
    assert load_tiny(tmp_path).eos_ids == {2, 7}
