"""A GGUF file becomes a Hugging Face directory in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from moonpool.core.errors import ConfigError

Progress = Callable[[str], None]

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
