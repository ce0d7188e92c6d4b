"""A model of another family with random weights: the shape and the tokenizer of a model that is here.

It says nothing worth reading, and costs what a trained model of that shape costs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal, get_args

from moonpool.core.errors import ConfigError

Family = Literal["qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)


def make_random_model(folder: Path, family: Family, like: Path) -> Path:
    """Writes a bf16 model of ``family`` as large as ``like`` into ``folder``. Qwen2 has biases on q, k and v, Qwen3 norms on
    q and k. ConfigError: ``like`` is no Llama-shaped model, or has no tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **shape_of(like), bos_token_id=None, eos_token_id=None, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.02)  # zeros would hide whether they are used
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (like / name).is_file():
            shutil.copyfile(like / name, folder / name)
    return folder


def shape_of(like: Path) -> dict[str, Any]:
    """The sizes in its config.json; ConfigError where one is missing."""
    found = json.loads((like / "config.json").read_text())
    missing = [name for name in _SHAPE if name not in found]
    if missing or not (like / "tokenizer.json").is_file():
        what = f"config.json names no {', '.join(missing)}" if missing else "there is no tokenizer.json"
        raise ConfigError(f"family: {like} cannot lend its shape: {what}; give a Llama-shaped model", param="family")
    head = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    return {**{name: found[name] for name in _SHAPE}, "head_dim": head, "use_sliding_window": False}
