"""Adapters as PEFT saves them (adapter_config.json, adapter_model.safetensors), read or refused by name before anything serves.

What is read is LoRA on the linear layers of attention and MLP, with one rank and one scaling for all of them. Everything else
that such a directory may ask for would change answers if it were ignored, so it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from moonpool.core.errors import UnsupportedModel
from moonpool.core.parsing import read_json
from moonpool.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_digest
from moonpool.engine.low_rank import Adapters, LowRank

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
# What changes an answer, and the value that does not. ``init_lora_weights`` by name: of some kinds the weights of the model
# that was trained are not those of its checkpoint.
_UNSET: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_READ = {"r", "lora_alpha", "use_rslora"}
# What concerns training, or which layers were trained: the tensors say so themselves.
_INERT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "parent_library",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One adapter before it meets a model: A and B by the name of their module."""

    name: str
    scaling: float
    rank: int
    halves: dict[str, dict[str, torch.Tensor]]


def refuse(name: str, what: str, fix: str = "use another adapter") -> UnsupportedModel:
    return UnsupportedModel(f"model.adapters: {name!r}: {what}; {fix}", param="model.adapters")


def load_adapters(named: Mapping[str, str], model: nn.Module, cache: Path) -> Adapters:
    """The adapters ``named`` (directories by name) for ``model``, in its dtype and on its device.

    UnsupportedModel names the adapter and what of it is not computed; ConfigError: files are missing.
    """
    of: dict[nn.Module, dict[str, LowRank]] = {}
    digests: dict[str, str] = {}
    for name, directory in named.items():
        place = Path(directory).expanduser()
        digest = adapter_digest(name, place, cache)
        if digest in digests:
            raise refuse(name, f"it is the same as {digests[digest]!r}", "name it once")
        digests[digest] = name
        file = _read(name, place)
        for module, halves in file.halves.items():
            of.setdefault(_linear(file, module, model), {})[digest] = _pair(file, module, halves, model)
    return Adapters(frozenset(digests), of)


def _read(name: str, directory: Path) -> _File:
    raw = _config(name, directory / ADAPTER_CONFIG)
    for key, fine in _UNSET.items():
        if raw.get(key) not in fine:
            raise refuse(name, f"{ADAPTER_CONFIG}: {key} is {raw.get(key)!r}, only {fine[-1] or fine[0]!r} is computed")
    for key in sorted(raw.keys() - _UNSET.keys() - _READ - _INERT):
        if raw[key]:  # a younger PEFT writes keys with values that mean "unset"
            raise refuse(
                name,
                f"{ADAPTER_CONFIG}: {key} is {raw[key]!r}, which is not known here and may change answers",
                "take it out if it only concerns training",
            )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise refuse(name, f"{ADAPTER_CONFIG}: r is {rank!r}, a rank of 1 or more is needed")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise refuse(name, f"{ADAPTER_CONFIG}: lora_alpha is {alpha!r}, a number is needed")
    scaling = alpha / (rank**0.5 if raw.get("use_rslora") else rank)
    try:
        tensors = load_file(directory / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as e:
        raise refuse(name, f"{directory / ADAPTER_WEIGHTS} is not readable ({e})", "fetch it again") from e
    return _File(name, scaling, rank, _halves(name, tensors))


def _config(name: str, file: Path) -> dict[str, Any]:
    try:
        raw = read_json(file.read_bytes())
    except (OSError, ValueError) as e:
        raise refuse(name, f"{file} is not readable ({e})", "fetch it again") from e
    if not isinstance(raw, dict):
        raise refuse(name, f"{file} is no JSON object", "fetch it again")
    return raw


def _halves(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None or match["module"].rsplit(".", 1)[-1] not in TARGETS:
            raise refuse(name, f"it has the tensor {key!r}; LoRA of {', '.join(TARGETS)} is all that is computed")
        halves = found.setdefault(match["module"], {})
        if match["half"] in halves:
            raise refuse(
                name, f"it has {match['module']}.lora_{match['half']} by two names, one of them {key!r}", "fetch it again"
            )
        halves[match["half"]] = tensor
    if not found:
        raise refuse(name, "it has no tensors")
    return found


def _linear(file: _File, module: str, model: nn.Module) -> nn.Linear:
    try:
        found = model.get_submodule(module)
    except AttributeError:
        found = None
    if type(found) is not nn.Linear:
        raise refuse(file.name, f"the model has no linear layer {module!r}", "use an adapter that was trained for this model")
    return found


def _pair(file: _File, module: str, halves: Mapping[str, torch.Tensor], model: nn.Module) -> LowRank:
    linear = _linear(file, module, model)
    want = {"A": (file.rank, linear.in_features), "B": (linear.out_features, file.rank)}
    for half, shape in want.items():
        if half not in halves:
            raise refuse(file.name, f"{module}.lora_{half} is missing", "fetch it again")
        if tuple(halves[half].shape) != shape:
            has = tuple(halves[half].shape)
            raise refuse(
                file.name,
                f"{module}.lora_{half} has shape {has}, {shape} is needed",
                "use an adapter that was trained for this model",
            )
        if not halves[half].is_floating_point():
            raise refuse(file.name, f"{module}.lora_{half} is of {halves[half].dtype}, quantised weights are not computed")
    weight = linear.weight
    down = halves["A"].to(weight.device, weight.dtype)
    up = (halves["B"].float() * file.scaling).to(weight.device, weight.dtype)
    if not bool(down.isfinite().all() and up.isfinite().all()):
        raise refuse(
            file.name,
            f"{module}: lora_A, lora_B or lora_alpha over r ({file.scaling:g}) hold infinity or NaN in {weight.dtype}",
            "fetch it again",
        )
    return LowRank(down, up)
