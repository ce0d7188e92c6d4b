"""What the engine refuses, by name, before a single token is served.

A model that runs but computes something else than its authors meant is the worst outcome, so the list is of what is
known to be right; anything else is refused. ``check_config`` judges the configuration file, ``Probe`` what the model
really asks of its attention function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moonpool.core.layout import MLA
from moonpool.engine.attention import AttentionCall, LatentCall
from moonpool.engine.latent_support import is_latent, latent_width
from moonpool.engine.refusals import MEND, one_number, refuse
from moonpool.engine.shape import PLAIN, Shape

# Rotary kinds whose angles depend on the position alone. The others switch with the length of the sequence, so that
# K/V of a prefix would depend on what follows it.
FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
LENGTH_ROPE = frozenset({"dynamic", "longrope"})
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Classes whose checkpoints the library reads as another model_type than they name: Mistral with layer_types.
_RENAMED = {"ministral": ("MistralForCausalLM",)}


def check_config(config: PreTrainedConfig) -> Shape:
    """UnsupportedModel unless ``config`` is of a decoder-only causal language model whose K/V this engine pages."""
    kind = config.model_type
    named = getattr(config, "architectures", None) or []
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise refuse(f"config.json: architectures is {named!r}, a list of class names is needed", MEND)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    accepted = (causal,) if isinstance(causal, str) else tuple(causal or ())
    if config.is_encoder_decoder or not accepted:
        raise refuse(f"architecture {(named or [kind])[0]!r} is not a decoder-only causal language model")
    if named and named[0] not in accepted + _RENAMED.get(kind, ()):
        raise refuse(
            f"architecture {named[0]!r} is not a decoder-only causal language model of model_type {kind!r}, which is "
            f"{accepted[0]!r}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise refuse("the checkpoint is quantized (quantization_config)", "use its unquantized version")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise refuse(f"{kind!r} uses bidirectional attention")
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS)
    if odd:
        raise refuse(f"layer type {odd[0]!r} is not implemented; known are {', '.join(sorted(ATTENTION_KINDS))}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refuse(f"{kind!r} shares K/V between layers (num_kv_shared_layers)")
    for name in SOFT_CAPS:
        cap = getattr(config, name, None)
        if cap is not None and not 0 < cap < math.inf:
            raise refuse(f"config.json: {name} is {cap!r}, a positive number or null (no cap) is needed", MEND)
    return _shape(config)


def _shape(config: PreTrainedConfig) -> Shape:
    layers = one_number(config, "num_hidden_layers")
    heads = one_number(config, "num_attention_heads")
    if is_latent(config):
        return Shape(layers, heads, 1, latent_width(config), MLA)
    kv_heads = one_number(config, "num_key_value_heads", heads)
    head_dim = one_number(config, "head_dim", config.hidden_size // heads)
    if heads % kv_heads:
        raise refuse(f"config.json: {heads} attention heads are not a multiple of {kv_heads} K/V heads")
    return Shape(layers, heads, kv_heads, head_dim)


def check_rope(config: PreTrainedConfig, max_context: int) -> None:
    """UnsupportedModel unless every rotary kind is known, looks at all that it is given and, up to ``max_context`` tokens,
    depends on the position alone."""
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in FIXED_ROPE | LENGTH_ROPE:
            raise refuse(f"rope type {kind!r} is unknown; known are {', '.join(sorted(FIXED_ROPE | LENGTH_ROPE))}")
        _check_all_is_looked_at(config.model_type, rope, kind)
        if kind in LENGTH_ROPE:
            original = _original_length(config, rope)
            if max_context > original:
                raise refuse(
                    f"rope type {kind!r} changes all angles beyond {original} tokens, so cached prefixes would be wrong",
                    f"set model.max_context to {original} or less",
                )


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Rotary parameters, those of each layer type where they differ by it."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    of_types = [name for name, value in parameters.items() if isinstance(value, dict)]
    if not of_types:
        return [parameters]
    one_for_all = sorted({"rope_type", "type", "factor"} & set(parameters))
    if one_for_all or not getattr(config, "layer_types", None):
        raise refuse(
            f"config.json: its rope parameters hold some for {of_types[0]!r} alone, which {config.model_type!r} looks at for "
            f"no layer or beside {one_for_all}",
            MEND,
        )
    return [value for value in parameters.values() if isinstance(value, dict)]


def _check_all_is_looked_at(model_type: str, rope: dict[str, Any], kind: str) -> None:
    """The library's classes go by ``rope_type`` and leave the rest alone, however it was meant."""
    renamed = kind == "longrope" and rope.get("type") in ("su", "yarn")  # by the library's class for Phi-3
    if rope.get("type") not in (None, kind) and not renamed:
        raise refuse(f"config.json: its rope parameters say type {rope['type']!r}, and rope_type is {kind!r}", MEND)
    if kind == "default" and rope.get("factor") not in (None, 1):
        raise refuse(f"config.json: its rope parameters say factor {rope['factor']!r}, but no rope_type that looks at it", MEND)
    if model_type in PLAIN and rope.get("partial_rotary_factor") not in (None, 1):
        part = rope["partial_rotary_factor"]
        raise refuse(f"config.json: partial_rotary_factor is {part!r}, and {model_type!r} turns whole heads", MEND)


def _original_length(config: PreTrainedConfig, rope: dict[str, Any]) -> int:
    """Tokens up to which angles stay. The library's functions take it from any of these places."""
    name = "original_max_position_embeddings"
    said = [rope.get(name), getattr(config, name, None)]
    lengths = [value for value in said if value is not None] or [config.max_position_embeddings]
    odd = next((value for value in lengths if not isinstance(value, int) or value < 1), None)
    if odd is not None:
        raise refuse(f"config.json: {name} is {odd!r}, a number of tokens is needed", MEND)
    return int(min(lengths))


@dataclass(slots=True)
class Probe:
    """A step that attends to nothing and records what each layer asked for."""

    calls: list[tuple[int, AttentionCall]] = field(default_factory=list)
    latent_calls: list[tuple[int, LatentCall]] = field(default_factory=list)

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        self.calls.append((layer, call))
        return call.query.transpose(0, 1).clone()

    def attend_latent(self, layer: int, call: LatentCall) -> torch.Tensor:
        self.latent_calls.append((layer, call))
        return call.query_latent.transpose(0, 1).clone()

    def made(self) -> Iterator[torch.Tensor]:
        """What layers would have written into pages."""
        for _, call in self.calls:
            yield from (call.key, call.value)
        for _, latent_call in self.latent_calls:
            yield latent_call.latent


def check_calls(probe: Probe, config: PreTrainedConfig, shape: Shape) -> None:
    """UnsupportedModel unless every layer asked once, in order, for attention that the backends implement."""
    kind = config.model_type
    layers = [layer for layer, _ in (*probe.calls, *probe.latent_calls)]
    if layers != list(range(shape.layers)):
        raise refuse(f"{kind!r} calls its attention function for layers {layers}, each of {shape.layers} once is needed")
    if shape.kind == MLA:
        _check_latent_calls(probe, kind, shape)
        return
    kinds = getattr(config, "layer_types", None) or [None] * shape.layers
    windows = [call.window for _, call in probe.calls]
    for (layer, call), layer_kind in zip(probe.calls, kinds, strict=True):
        if not call.causal:
            raise refuse(f"layer {layer} of {kind!r} is not causal")
        want = (shape.kv_heads, shape.head_dim)
        for tensor in (call.key, call.value):
            if (tensor.shape[0], tensor.shape[2]) != want:
                raise refuse(
                    f"layer {layer} of {kind!r} has K/V of {tensor.shape[0]} heads of {tensor.shape[2]}, "
                    f"{want[0]} heads of {want[1]} in every layer are needed"
                )
        if call.query.shape[0] != shape.heads or call.query.shape[2] != shape.head_dim:
            raise refuse(f"layer {layer} of {kind!r} has queries of shape {tuple(call.query.shape)}")
        if call.extra:
            raise refuse(
                f"layer {layer} of {kind!r} asks its attention function for {call.extra[0]!r}, which is not implemented"
            )
        _check_scaling(kind, layer, call.scaling)
        if getattr(config, "attn_logit_softcapping", None) and call.softcap is None:
            raise refuse(f"layer {layer} of {kind!r} does not say its attn_logit_softcapping")
        if call.window is not None and call.window < 1:
            raise refuse(f"config.json: sliding_window is {call.window}, 1 token or more is needed in layer {layer}", MEND)
        if layer_kind == "full_attention" and call.window is not None:
            raise refuse(
                f"config.json: layer_types says 'full_attention' of layer {layer}, which {kind!r} computes with a window of "
                f"{call.window} tokens",
                MEND,
            )
        if layer_kind == "sliding_attention" and call.window is None:
            raise refuse(f"layer {layer} of {kind!r} is a sliding window layer but does not say its window")
    if getattr(config, "sliding_window", None) and kinds[0] is None and not any(windows):
        raise refuse(f"{kind!r} has sliding_window {config.sliding_window} but no layer uses it")


def _check_scaling(kind: str, layer: int, scaling: object) -> None:
    """Computed from config.json by the library, a complex number included."""
    if not isinstance(scaling, int | float) or not 0 < scaling < math.inf:
        raise refuse(
            f"layer {layer} of {kind!r} multiplies its scores by {scaling!r}, a positive number is needed: config.json has a "
            "wrong query_pre_attn_scalar, head_dim or factor of its rotary embedding",
            MEND,
        )


def _check_latent_calls(probe: Probe, kind: str, shape: Shape) -> None:
    for layer, call in probe.latent_calls:
        _check_scaling(kind, layer, call.scaling)
        heads, _, rank = call.query_latent.shape
        width = rank + call.query_rope.shape[2]
        if (heads, width, call.latent.shape[1]) != (shape.heads, shape.head_dim, shape.head_dim):
            raise refuse(
                f"layer {layer} of {kind!r} has {heads} heads over latent rows of {width}, {shape.heads} heads over rows of "
                f"{shape.head_dim} in every layer are needed"
            )
    if len(probe.latent_calls) != shape.layers:
        raise refuse(f"{kind!r} has layers without latent attention")
