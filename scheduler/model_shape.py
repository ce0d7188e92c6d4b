"""What a model costs per token, read from its ``config.json``: KV bytes, weight bytes, FLOPs. Llama-shaped and MLA models,
dense or with experts, as Hugging Face writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Over all layers. ``linear_flops``: of one token, attention and embeddings left out. ``attention_flops``: of one query
    with one key. ``expert_bytes``: the part of ``weight_bytes`` of which a token reads ``expert_share``."""

    name: str
    layers: int
    hidden: int
    kv_bytes: float  # of one token
    weight_bytes: float
    expert_bytes: float
    expert_share: float
    linear_flops: float
    attention_flops: float
    max_tokens: int = 0  # 0: the configuration does not say

    def read_bytes(self, batch: float) -> float:
        """Of weights, in one step of ``batch`` sequences whose experts are drawn independently."""
        return self.weight_bytes - self.expert_bytes * float((1.0 - self.expert_share) ** max(batch, 0.0))


class _Fields:
    """Whole numbers of a configuration, by any of their names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                raise ConfigError(f"config.json: {name} is {value!r}; a whole number is needed", param=name)
        if default is None:
            raise ConfigError(
                f"config.json: {' or '.join(names)} is missing; a Llama-shaped or MLA model of Hugging Face names it",
                param=names[0],
            )
        return default

    def word(self, *names: str) -> str:
        return next((str(self._config[name]) for name in names if self._config.get(name)), "")

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._config.get(name, default))


def shape_of(config: Mapping[str, Any], name: str = "", kv_dtype: str = "") -> ModelShape:
    """``config``: the parsed config.json. ``kv_dtype``: of the cache; empty: the model's own. ConfigError names what is
    missing."""
    inner = config.get("text_config")
    fields = _Fields({**config, **inner} if isinstance(inner, Mapping) else config)
    layers, hidden = fields.number("num_hidden_layers"), fields.number("hidden_size")
    heads = fields.number("num_attention_heads")
    if not (layers and hidden and heads):
        raise ConfigError("config.json: num_hidden_layers, hidden_size and num_attention_heads must not be 0")
    dtype = fields.word("dtype", "torch_dtype").removeprefix("torch.") or DEFAULT_DTYPE
    weight_item = 1 if _quantised(config) else _bytes(dtype, "torch_dtype")
    kv_item = _bytes(kv_dtype or dtype, "--kv-dtype" if kv_dtype else "torch_dtype")
    mla = fields.number("kv_lora_rank", default=0) > 0
    matrices, pair_flops, kv_width = (_mla if mla else _grouped)(fields, hidden, heads)
    dense, expert, chosen = _feed_forward(fields, layers, hidden)
    read_once = layers * matrices + dense
    vocabulary = fields.number("vocab_size", default=0) * hidden
    tables = vocabulary if fields.flag("tie_word_embeddings", default=False) else 2 * vocabulary
    return ModelShape(
        name or fields.word("_name_or_path", "model_type"),
        layers,
        hidden,
        float(layers * kv_width * kv_item),
        float(weight_item * (read_once + expert + tables)),
        float(weight_item * expert),
        chosen,
        2.0 * (read_once + expert * chosen),
        float(layers * pair_flops),
        fields.number("max_position_embeddings", default=0),
    )


def _grouped(fields: _Fields, hidden: int, heads: int) -> tuple[int, int, int]:
    """Weights of one layer's attention, FLOPs of a query with a key, KV values of a token."""
    size = fields.number("head_dim", default=hidden // heads)
    groups = fields.number("num_key_value_heads", default=heads)
    return 2 * hidden * size * (heads + groups), 4 * heads * size, 2 * groups * size


def _mla(fields: _Fields, hidden: int, heads: int) -> tuple[int, int, int]:
    """The same for multi-head latent attention (DeepSeek-V2): one latent and one rotary key are kept for all heads."""
    latent, rotary = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
    plain, value = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
    rank = fields.number("q_lora_rank", default=0)
    query = heads * (plain + rotary)
    queries = rank * (hidden + query) if rank else hidden * query
    keys = hidden * (latent + rotary) + latent * heads * (plain + value)
    return queries + keys + heads * value * hidden, 2 * heads * (plain + rotary + value), latent + rotary


def _feed_forward(fields: _Fields, layers: int, hidden: int) -> tuple[int, int, float]:
    """Weights that every token reads, weights of routed experts, and the share of those a token reads. Gated: 3 matrices."""
    inner = fields.number("intermediate_size", default=0)
    experts = fields.number("n_routed_experts", "num_experts", "num_local_experts", default=0)
    if not experts:
        return 3 * hidden * fields.number("intermediate_size") * layers, 0, 0.0
    width = fields.number("moe_intermediate_size", default=inner)
    plain = min(fields.number("first_k_dense_replace", default=0), layers)
    shared = fields.number("n_shared_experts", default=0) * width
    shared += fields.number("shared_expert_intermediate_size", default=0)
    sparse = layers - plain
    always = 3 * hidden * (inner * plain + shared * sparse) + hidden * experts * sparse
    return always, 3 * hidden * width * experts * sparse, min(fields.number("num_experts_per_tok") / experts, 1.0)


def _quantised(config: Mapping[str, Any]) -> bool:
    method = config.get("quantization_config")
    return isinstance(method, Mapping) and "fp8" in str(method.get("quant_method", ""))


def _bytes(dtype: str, field: str) -> int:
    for known, size in DTYPE_BYTES.items():
        if dtype.startswith(known):
            return size
    if dtype.startswith("fp8"):
        return 1
    raise ConfigError(f"{field}: {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}", param=field)
