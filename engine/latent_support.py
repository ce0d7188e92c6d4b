"""Which models with multi-head latent attention are computed: what their configuration files may say."""

from __future__ import annotations

from transformers import PreTrainedConfig

from moonpool.engine.refusals import one_number, refuse

# What the library's classes take for granted whatever the file says, by model_type: another value would be computed wrong.
_TAKEN_FOR_GRANTED: dict[str, dict[str, tuple[object, ...]]] = {
    "deepseek_v2": {
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}


def is_latent(config: PreTrainedConfig) -> bool:
    return any(getattr(config, name, None) is not None for name in ("kv_lora_rank", "q_lora_rank"))


def latent_width(config: PreTrainedConfig) -> int:
    """Numbers of one token in one layer's pages. UnsupportedModel names what is not known to be computed right."""
    kind = config.model_type
    granted = _TAKEN_FOR_GRANTED.get(kind)
    if granted is None:
        raise refuse(
            f"{kind!r} uses multi-head latent attention (kv_lora_rank), which is implemented for "
            f"{' and '.join(sorted(_TAKEN_FOR_GRANTED))} only"
        )
    for name, known in granted.items():
        value = getattr(config, name, None)
        if value is not None and value not in known:
            raise refuse(f"config.json: {name} is {value!r} in a model of type {kind!r}, {known[0]!r} is implemented")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads != kv_heads:
        raise refuse(f"config.json: num_key_value_heads is {kv_heads}; latent attention has one for each of {heads} heads")
    for name in ("qk_nope_head_dim", "v_head_dim"):
        one_number(config, name)
    return one_number(config, "kv_lora_rank") + one_number(config, "qk_rope_head_dim")
