"""Adapters against the library with their weights merged: W + s B A, computed by plain transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runner import Runner, random_ids, save_tiny
from safetensors.torch import load_file, save_file
from support.adapters import write_adapter
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig

from moonpool.core.blocks import BlockHasher, namespace
from moonpool.core.config import Config, EngineConfig, ModelConfig
from moonpool.core.errors import ConfigError, UnsupportedModel
from moonpool.engine import adapting
from moonpool.engine.checkpoint import adapter_digest
from moonpool.engine.engine import Engine, Row, load_engine
from moonpool.engine.families import recipe_of
from moonpool.engine.loading import ADAPTER_COPIES, memory_budget
from moonpool.engine.models import resolve_model
from moonpool.engine.trial import difference

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
ATTENTION, EVERYTHING = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=32),
    "qwen2": Qwen2Config(**{name: size for name, size in SIZES.items() if name != "head_dim"}),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
}
OUTPUTS = 12


@torch.inference_mode()
def merged_logits(model_dir: Path, added: dict[str, torch.Tensor], ids: Sequence[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary]."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    for name, weight in added.items():
        model.get_parameter(name).add_(weight)
    logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


@dataclass
class Adapted:
    model_dir: Path
    added: dict[str, dict[str, torch.Tensor]]  # by adapter's name, and empty of the model alone
    digests: dict[str, str]

    def engine(self, backend: str = "auto", dtype: str = "float32", **engine: object) -> Engine:
        names = {name: str(self.model_dir / name) for name in self.added if name}
        model = ModelConfig.model_validate({"path": str(self.model_dir), "dtype": dtype, "adapters": names})
        settings = EngineConfig.model_validate({"block_tokens": 16, "poison": True, "backend": backend, **engine})
        config = Config(model=model, engine=settings)
        return load_engine(config, self.model_dir, threads=1, pages=64, cache=self.model_dir / "cache")


def make(folder: Path, kind: str) -> Adapted:
    save_tiny(folder, CONFIGS[kind])
    targets = ATTENTION if "moe" in kind else EVERYTHING
    added = {
        "": {},
        "narrow": write_adapter(folder / "narrow", folder, ATTENTION, rank=4, alpha=8, seed=1),
        "wide": write_adapter(folder / "wide", folder, targets, rank=6, alpha=6, seed=2, rslora=True),
    }
    digests = {name: adapter_digest(name, folder / name, folder / "cache") if name else "" for name in added}
    return Adapted(folder, added, digests)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make(tmp_path_factory.mktemp("adapted"), "llama")


def _together(
    engine: Engine, made: Adapted, prompts: list[list[int]], names: list[str]
) -> list[tuple[list[int], torch.Tensor]]:
    """Greedy ids and logits of all prompts, each with the adapter of that name, in one batch, in chunks of 13."""
    tables = [engine.pages.allocate(-(-(len(prompt) + OUTPUTS) // 16)) for prompt in prompts]
    ids, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while live := [i for i in range(len(ids)) if len(logits[i]) < OUTPUTS]:
        ends = [min(done[i] + 13, len(ids[i])) for i in live]
        rows = [
            Row.of(ids[i], done[i], end, tables[i], wants_logits=end == len(ids[i]), adapter=made.digests[names[i]])
            for i, end in zip(live, ends, strict=True)
        ]
        said = iter(engine.forward(rows).clone())
        for i, end in zip(live, ends, strict=True):
            done[i] = end
            if end == len(ids[i]):
                logits[i].append(next(said))
                ids[i].append(int(logits[i][-1].argmax()))
    for table in tables:
        engine.pages.release(table)
    return [(mine[len(prompt) :], torch.stack(told)) for mine, prompt, told in zip(ids, prompts, logits, strict=True)]


@pytest.mark.parametrize("backend", ["fused", "torch"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2", "qwen3_moe"])
def test_a_batch_that_mixes_adapters_equals_the_library_with_merged_weights(kind: str, backend: str, tmp_path: Path) -> None:
    made = make(tmp_path, kind)
    engine = made.engine(backend)
    assert engine.backend_name == backend
    prompts = [random_ids(n, seed=n) for n in (40, 7, 33, 16, 20, 5)]
    names = ["wide", "", "narrow", "wide", "", "narrow"]
    for prompt, name, (ids, logits) in zip(prompts, names, _together(engine, made, prompts, names), strict=True):
        want = merged_logits(made.model_dir, made.added[name], [*prompt, *ids])[len(prompt) - 1 : -1]
        assert ids == want.argmax(1).tolist(), name
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-5)
    engine.close()


def test_bfloat16_stays_near_the_merged_weights_in_float32(llama: Adapted) -> None:
    engine = llama.engine(dtype="bfloat16")
    assert engine.backend_name == "fused"
    assert "not compiled: model.adapters" in engine.backend_note
    prompts, names = [random_ids(n, seed=n) for n in (40, 7, 33)], ["wide", "", "narrow"]
    for prompt, name, (ids, logits) in zip(prompts, names, _together(engine, llama, prompts, names), strict=True):
        want = merged_logits(llama.model_dir, llama.added[name], [*prompt, *ids])[len(prompt) - 1 : -1]
        assert difference(logits, want) < 0.1
    engine.close()


def test_a_prefix_of_one_adapter_is_no_hit_for_another(llama: Adapted) -> None:
    engine = llama.engine()
    prompt = random_ids(48, seed=4)
    for name, cached in (("", 0), ("narrow", 0), ("wide", 0), ("narrow", 47), ("", 47), ("wide", 47)):
        runner = Runner(engine, reuse=True, adapter=llama.digests[name])
        runner.hasher = BlockHasher(bytes(32), namespace(engine.layout, adapter=llama.digests[name]), 16)
        got = runner.run([prompt], OUTPUTS)[0]
        want = merged_logits(llama.model_dir, llama.added[name], [*prompt, *got.tokens])[47:-1]
        assert got.cached == cached
        assert got.tokens == want.argmax(1).tolist()
    engine.pages.clear_cached()
    engine.close()


def test_digests_tell_weights_and_scaling_apart_whatever_the_name(llama: Adapted, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    write_adapter(copy, llama.model_dir, ATTENTION, rank=4, alpha=8, seed=1)
    assert adapter_digest("other", copy, tmp_path) == llama.digests["narrow"]
    _change(copy, lora_alpha=9)
    assert adapter_digest("other", copy, tmp_path) not in llama.digests.values()


def _change(directory: Path, **values: object) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _add(directory: Path, name: str, *shape: int) -> None:
    file = directory / "adapter_model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(shape)}, file)


def _every(directory: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = directory / "adapter_model.safetensors"
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "DoRA": (lambda d: _change(d, use_dora=True), "use_dora is True"),
    "trained biases": (lambda d: _change(d, bias="lora_only"), "bias is 'lora_only'"),
    "saved modules": (lambda d: _change(d, modules_to_save=["lm_head"]), "modules_to_save"),
    "ranks by pattern": (lambda d: _change(d, rank_pattern={"q_proj": 8}), "rank_pattern"),
    "another method": (lambda d: _change(d, peft_type="LOHA"), "peft_type is 'LOHA', only 'LORA'"),
    "a changed model": (lambda d: _change(d, init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    "what a younger PEFT may ask for": (lambda d: _change(d, use_newdora=[1]), r"use_newdora is \[1\], which is not known"),
    "no rank": (lambda d: _change(d, r=0), "r is 0"),
    "another rank": (lambda d: _change(d, r=8), r"lora_A has shape \(4, 48\), \(8, 48\) is needed"),
    "no alpha": (lambda d: _change(d, lora_alpha=None), "lora_alpha is None"),
    "no JSON": (lambda d: (d / "adapter_config.json").write_text("{"), "adapter_config.json is not readable"),
    "no weights inside": (lambda d: (d / "adapter_model.safetensors").write_bytes(b"x" * 9), "is not readable"),
    "embeddings": (lambda d: _add(d, "base_model.model.model.embed_tokens.lora_embedding_A", 4, 128), "lora_embedding_A"),
    "the head": (lambda d: _add(d, "base_model.model.lm_head.lora_A.weight", 4, 48), "lm_head.lora_A.weight"),
    "magnitudes": (lambda d: _add(d, f"{Q}.lora_magnitude_vector", 64), "lora_magnitude_vector"),
    "a layer too many": (
        lambda d: _add(d, f"{Q.replace('.0.', '.7.')}.lora_A.weight", 4, 48),
        r"no linear layer 'model.layers.7.self_attn.q_proj'",
    ),
    "quantised weights": (lambda d: _every(d, lambda t: t.to(torch.int8)), "q_proj.lora_A is of torch.int8"),
    "infinity": (lambda d: _every(d, lambda t: t + math.inf), "q_proj: lora_A, lora_B or .* hold infinity or NaN"),
    "an alpha that is no number": (lambda d: _change(d, lora_alpha=math.nan), r"over r \(nan\) hold infinity or NaN"),
    "one module by two names": (
        lambda d: _add(d, f"{Q.removeprefix('base_model.model.')}.lora_A.weight", 4, 48),
        "q_proj.lora_A by two names",
    ),
    "half a pair": (lambda d: _add(d, f"{Q.replace('q_proj', 'o_proj')}.lora_A.weight", 4, 64), "o_proj.lora_B is missing"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_computed_is_refused_by_name(what: str, llama: Adapted, tmp_path: Path) -> None:
    directory = tmp_path / "odd"
    write_adapter(directory, llama.model_dir, ATTENTION, rank=4, alpha=8, seed=1)
    change, reason = WRONG[what]
    change(directory)
    with pytest.raises(UnsupportedModel, match=f"model.adapters: 'odd': .*{reason}.*; (use|fetch|take)"):
        _load(llama, {"odd": str(directory)})


def test_keys_of_training_and_younger_keys_that_say_unset_are_fine(llama: Adapted, tmp_path: Path) -> None:
    directory = tmp_path / "trained"
    write_adapter(directory, llama.model_dir, ATTENTION, rank=4, alpha=8, seed=7)
    _change(directory, lora_dropout=0.1, peft_version="0.18.0", qalora_group_size=16, use_newdora=False, newdora_at=None)
    _load(llama, {"trained": str(directory)}).close()


def _load(made: Adapted, adapters: dict[str, str], **engine: object) -> Engine:
    model = ModelConfig(path=str(made.model_dir), dtype="float32", adapters=adapters)
    settings = EngineConfig.model_validate({"block_tokens": 16, **engine})
    config = Config(model=model, engine=settings)
    return load_engine(config, made.model_dir, threads=1, pages=8, cache=made.model_dir / "cache")


def test_where_adapters_are_not_computed_the_field_says_so(llama: Adapted, tmp_path: Path) -> None:
    narrow = str(llama.model_dir / "narrow")
    with pytest.raises(ConfigError, match=r"model.adapters: 'gone': there is no .*adapter_config.json; give the directory"):
        _load(llama, {"gone": str(tmp_path)})
    with pytest.raises(UnsupportedModel, match="'twice': it is the same as 'once'"):
        _load(llama, {"once": narrow, "twice": narrow})
    with pytest.raises(ConfigError, match=r"engine.backend: 'compiled'.*model.adapters"):
        _load(llama, {"narrow": narrow}, backend="compiled")
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel: 2 ranks do not share adapters"):
        _load(llama, {"narrow": narrow}, tensor_parallel=2)


def test_memory_for_adapters_is_counted_before_it_is_taken(llama: Adapted, tmp_path: Path) -> None:
    def weights(adapters: dict[str, str]) -> int:
        model = ModelConfig(path=str(llama.model_dir), dtype="float32", adapters=adapters)
        return memory_budget(Config(model=model), llama.model_dir, pages=8).weights

    wide = llama.model_dir / "wide"
    numbers = sum(tensor.numel() for tensor in load_file(wide / "adapter_model.safetensors").values())
    assert weights({"wide": str(wide)}) == weights({}) + 4 * ADAPTER_COPIES * numbers
    assert weights({"gone": str(tmp_path / "gone")}) == weights({})


def test_a_directory_of_an_adapter_is_no_model(llama: Adapted) -> None:
    for path in (llama.model_dir / "narrow", llama.model_dir):
        (path / "adapter_config.json").touch()
        with pytest.raises(ConfigError, match=r"model.path: .* is an adapter .*give its base model .* in model.adapters"):
            resolve_model(str(path), path, lambda _: None)
        with pytest.raises(ConfigError, match="is an adapter"):
            load_engine(Config(model=ModelConfig(path=str(path))), path, threads=1, pages=8)
    (llama.model_dir / "adapter_config.json").unlink()


def test_a_backend_that_leaves_adapters_out_does_not_serve(llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "recipe_of", lambda model, context, adapters: recipe_of(model, context))
    engine = llama.engine()
    assert (engine.backend_name, engine.backend_note[:25]) == ("torch", "fused: its logits differ ")
    prompt, name = random_ids(20, seed=1), "wide"
    ids, logits = _together(engine, llama, [prompt], [name])[0]
    want = merged_logits(llama.model_dir, llama.added[name], [*prompt, *ids])[19:-1]
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-5)
    engine.close()
    with pytest.raises(ConfigError, match=r"engine.backend: 'fused' cannot serve.*its logits differ"):
        llama.engine("fused")


def test_without_a_recipe_the_modules_serve_unless_another_backend_was_asked_for(
    llama: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapting, "recipe_of", lambda model, context, adapters: None)
    with pytest.raises(ConfigError, match=r"engine.backend: 'fused' cannot serve.*is of no family"):
        llama.engine("fused")
    engine = llama.engine()
    assert engine.backend_name == "torch"
    engine.close()
