"""Our attention function, as transformers' attention interface calls it: write K/V into pages, fire hooks, attend.

The step at hand travels as a keyword argument from ``Engine.forward`` through the library's layers to the attention
function, so engines share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moonpool.core.errors import UnsupportedModel

NAME = "moonpool"


class Step(Protocol):
    """One forward pass, seen from inside a layer."""

    def attend(self, layer: int, call: AttentionCall) -> torch.Tensor:
        """[tokens, heads, head_dim] in the dtype of the query."""

    def attend_latent(self, layer: int, call: LatentCall) -> torch.Tensor:
        """[tokens, heads, kv_lora_rank] in the dtype of the query. Pages are of kind ``mla``."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks for. ``window`` counts the keys a query sees, itself included; None is all of them."""

    query: torch.Tensor  # [heads, tokens, head_dim]
    key: torch.Tensor  # [kv_heads, tokens, head_dim], rotary applied
    value: torch.Tensor  # [kv_heads, tokens, head_dim]
    scaling: float
    window: int | None
    softcap: float | None
    causal: bool
    extra: tuple[str, ...]  # names of further keyword arguments the library gave a value


@dataclass(frozen=True, slots=True)
class LatentCall:
    """What one layer of multi-head latent attention asks for, in absorbed form (DeepSeek-V2, 2024, section 2.1.2): all heads
    attend to the one row that each token has in the pages, its latent c and then its rotated key r. Head h of query i gives
    key j <= i the score ``scaling * (query_latent[h, i] . c[j] + query_rope[h, i] . r[j])``; the result is the mean of c
    weighted by their softmax.
    """

    query_latent: torch.Tensor  # [heads, tokens, kv_lora_rank]: the query times the part of kv_b_proj that makes its keys
    query_rope: torch.Tensor  # [heads, tokens, qk_rope_head_dim], rotary applied
    latent: torch.Tensor  # [tokens, kv_lora_rank + qk_rope_head_dim]: the rows of these tokens, to be written into pages
    scaling: float


# Keyword arguments of the library's layers that ask nothing of attention itself: positions are in the rotary embedding
# already, the cache is ours, and the rest selects what the library returns.
_HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, head_dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    moonpool_step: Step | None = None,
    **library: object,
) -> tuple[torch.Tensor, None]:
    if moonpool_step is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass keyword arguments on to its attention function; use another model",
            param="model.path",
        )
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    call = AttentionCall(
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        causal=causal,
        extra=tuple(name for name, value in library.items() if value is not None and name not in _HARMLESS),
    )
    layer: int = module.layer_idx  # type: ignore[assignment]  # every attention module of the library has one
    return moonpool_step.attend(layer, call)[None], None


def no_mask(*_: object, **__: object) -> None:
    """Rows of a flattened batch see their own pages only: no mask is ever built."""


def register() -> None:
    """Make ``attn_implementation="moonpool"`` known to the library. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface  # seconds, that ranks with weights of their own save

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
