"""Random adapters as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def write_adapter(
    directory: Path, model_dir: Path, targets: Sequence[str], *, rank: int, alpha: float, seed: int, rslora: bool = False
) -> dict[str, torch.Tensor]:
    """What it adds to each weight of the model in ``model_dir``, by the weight's name."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    added: dict[str, torch.Tensor] = {}
    scaling = alpha / (rank**0.5 if rslora else rank)
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in targets:
            down = torch.randn((rank, module.in_features), generator=draw) * 0.2
            up = torch.randn((module.out_features, rank), generator=draw) * 0.2
            tensors |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
            added[f"{name}.weight"] = scaling * up @ down
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": rslora, "target_modules": list(targets)}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"bias": "none", "use_dora": False}))
    return added
