"""From a module of the transformers library to a recipe, for the families whose layers are known line by line.

A family is told by the exact classes of its modules; a subclass, another class, or anything that the tables here do not
name has no recipe and is served by its module. What a layer asks of attention (scaling, window, soft cap) is not read from
the configuration but asked of the module itself, and rotary angles come from the module's own embedding, so that every
rope kind is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUTanh, SiLUActivation

from moonpool.engine.attention import AttentionCall
from moonpool.engine.family_classes import FAMILIES, Family
from moonpool.engine.low_rank import Adapters
from moonpool.engine.recipe import Activation, Experts, Layer, Projection, Recipe, Rotary
from moonpool.engine.support import Probe

_ACTIVATIONS: dict[type, Activation] = {SiLUActivation: "silu", nn.SiLU: "silu", GELUTanh: "gelu_tanh"}
_ROTARY_BLOCK = 4_096  # positions at once: the module computes angles of both halves, of which one is kept

_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_EXPERT_PARTS = {"gate", "experts"}
_SHARED_PARTS = {"shared_expert", "shared_expert_gate"}
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_POST_NORM_PARTS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


def known(model: nn.Module) -> bool:
    """Whether ``model`` is built as one of the families is."""
    return _family(model) is not None


def _family(model: nn.Module) -> Family | None:
    family = next((one for one in FAMILIES if type(model) is one.model), None)
    return family if family is not None and _as_known(model, family) else None


@torch.inference_mode()
def recipe_of(model: nn.Module, max_context: int, adapters: Adapters | None = None) -> Recipe | None:
    """None: the model stays as it is. Else its weights have moved into the recipe, and ``model`` can compute no more.

    Merged weights are made layer by layer, so never more than one layer's weights exist twice.
    """
    family = _family(model)
    if family is None:
        return None
    root: Any = model
    decoder, config, activation = root.model, root.config, type(_act(root.model.layers[0].mlp, family))
    calls = _asked(model)
    kinds, rotaries = _rotaries(decoder, family, max_context)
    softcap, scaling, dim = calls[0].softcap, calls[0].scaling, calls[0].query.shape[2]
    if any((call.softcap, call.scaling) != (softcap, scaling) for call in calls) or any(
        r.cos.shape[1] * 2 != dim for r in rotaries
    ):
        return None
    layers = zip(decoder.layers, calls, kinds, strict=True)
    embedding = decoder.embed_tokens.weight
    return Recipe(
        hidden=embedding.shape[1],
        heads=calls[0].query.shape[0],
        kv_heads=calls[0].key.shape[0],
        head_dim=dim,
        intermediate=max((_width(layer.mlp) for layer in decoder.layers if not _is_sparse(layer.mlp, family)), default=0),
        vocabulary=root.lm_head.weight.shape[0],
        eps=_eps(decoder.norm),
        activation=_ACTIVATIONS[activation],
        scaling=scaling,
        attention_softcap=softcap,
        embedding=embedding,
        embedding_scale=float(decoder.embed_tokens.embed_scale.to(embedding.dtype)) if family.one_more else 1.0,
        layers=tuple(_layer(layer, family, call.window, kind, adapters) for layer, call, kind in layers),
        rotaries=rotaries,
        final_norm=_norm(decoder.norm, family),
        head=_projection([root.lm_head], adapters),
        logits_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _as_known(model: nn.Module, family: Family) -> bool:
    """Whether every module below ``model`` is one that the family's layers are made of, in the places they stand in."""
    root: Any = model
    decoder, head = root.model, root.lm_head
    if _names(model) != {"model", "lm_head"} or not _are([(decoder, family.decoder), (head, nn.Linear)]):
        return False
    if _names(decoder) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    outer = [(decoder.embed_tokens, family.embedding), (decoder.norm, family.norm), (decoder.rotary_emb, family.rotary)]
    if not _are(outer) or not all(_plain(layer, family) for layer in decoder.layers):
        return False
    eps = {_eps(module) for module in model.modules() if type(module) is family.norm}
    activations = {type(_act(layer.mlp, family)) for layer in decoder.layers}
    dtypes = {weight.dtype for weight in model.parameters()}
    return len(eps) == len(activations) == len(dtypes) == 1 and activations <= set(_ACTIVATIONS)


def _plain(layer: Any, family: Family) -> bool:
    if _names(layer) != _LAYER_PARTS | (_POST_NORM_PARTS if family.post_norms else set()):
        return False
    if (
        not _are([(layer, family.layer), (layer.self_attn, family.attention)])
        or not _names(layer.self_attn) <= _ATTENTION_PARTS
    ):
        return False
    if not (_plain_experts(layer.mlp, family) if _is_sparse(layer.mlp, family) else _plain_mlp(layer.mlp, family)):
        return False
    parts = [*layer.named_children(), *layer.self_attn.named_children()]
    norms = [(module, family.norm) for name, module in parts if name.endswith("norm")]
    return _are(norms + [(module, nn.Linear) for name, module in parts if name.endswith("_proj")])


def _plain_mlp(mlp: Any, family: Family) -> bool:
    linears = [(module, nn.Linear) for name, module in mlp.named_children() if name.endswith("_proj")]
    return _names(mlp) == _MLP_PARTS and _are([(mlp, family.mlp), *linears])


def _is_sparse(mlp: nn.Module, family: Family) -> bool:
    return family.sparse is not None and type(mlp) is family.sparse.block


def _plain_experts(block: Any, family: Family) -> bool:
    """Of experts without biases, as all of these families have them."""
    sparse = family.sparse
    if sparse is None or block.gate.top_k < 1 or _names(block) != _EXPERT_PARTS | (_SHARED_PARTS if sparse.shared else set()):
        return False
    router, experts = block.gate, block.experts
    weights = {name for name, _ in [*router.named_parameters(), *experts.named_parameters()]}
    if weights != {"weight", "gate_up_proj", "down_proj"} or not _are([(router, sparse.router), (experts, sparse.experts)]):
        return False
    if not sparse.shared:
        return True
    same = type(block.shared_expert.act_fn) is type(experts.act_fn)
    return same and _plain_mlp(block.shared_expert, family) and type(block.shared_expert_gate) is nn.Linear


def _act(mlp: Any, family: Family) -> nn.Module:
    act: nn.Module = mlp.experts.act_fn if _is_sparse(mlp, family) else mlp.act_fn
    return act


def _width(mlp: Any) -> int:
    return int(mlp.down_proj.weight.shape[1])


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _are(modules: list[tuple[nn.Module, type]]) -> bool:
    return all(type(module) is kind for module, kind in modules)


def _asked(model: nn.Module) -> list[AttentionCall]:
    """What each layer asks of its attention function."""
    probe = Probe()
    model(
        input_ids=torch.zeros((1, 1), dtype=torch.int64),
        position_ids=torch.zeros((1, 1), dtype=torch.int64),
        use_cache=False,
        moonpool_step=probe,
    )
    return [call for _, call in probe.calls]


def _layer(layer: Any, family: Family, window: int | None, rotary: int, adapters: Adapters | None) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    after = layer.post_attention_layernorm
    experts = _experts(mlp, family) if _is_sparse(mlp, family) else None
    dense = mlp if experts is None else getattr(mlp, "shared_expert", None)
    return Layer(
        attention_norm=_norm(layer.input_layernorm, family),
        qkv=_projection([attention.q_proj, attention.k_proj, attention.v_proj], adapters),
        query_norm=_norm(attention.q_norm, family) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm, family) if hasattr(attention, "k_norm") else None,
        out=_projection([attention.o_proj], adapters),
        after_attention_norm=_norm(after, family) if family.post_norms else None,
        mlp_norm=_norm(layer.pre_feedforward_layernorm if family.post_norms else after, family),
        gate_up=None if dense is None else _projection([dense.gate_proj, dense.up_proj], adapters),
        down=None if dense is None else _projection([dense.down_proj], adapters),
        after_mlp_norm=_norm(layer.post_feedforward_layernorm, family) if family.post_norms else None,
        window=window,
        rotary=rotary,
        experts=experts,
    )


def _experts(block: Any, family: Family) -> Experts:
    """The block loses its large weights to it."""
    router, experts = block.gate, block.experts
    shared = block.shared_expert_gate if family.sparse is not None and family.sparse.shared else None
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    experts.gate_up_proj = experts.down_proj = None
    return Experts(
        router=router.weight.detach(),
        top_k=router.top_k,
        normalised=getattr(router, "norm_topk_prob", True),
        gate_up=gate_up,
        down=down,
        dense_gate=None if shared is None else Projection(shared.weight.detach(), shared.bias),
    )


def _projection(parts: list[Any], adapters: Adapters | None) -> Projection:
    """One projection for all ``parts``, their outputs one after another. Several parts lose their weights to it."""
    biases: list[torch.Tensor] = [part.bias for part in parts if part.bias is not None]
    low_ranks = None if adapters is None else adapters.merged(parts)
    if len(parts) == 1:
        return Projection(parts[0].weight.detach(), biases[0].detach() if biases else None, low_ranks)
    weight = torch.cat([part.weight for part in parts])
    for part in parts:
        part.weight = None  # its memory, before the next layer is merged
    return Projection(weight, torch.cat(biases) if biases else None, low_ranks)


def _norm(norm: Any, family: Family) -> torch.Tensor:
    weight: torch.Tensor = norm.weight.detach().float()
    return weight + 1.0 if family.one_more else weight


def _eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _rotaries(decoder: Any, family: Family, positions: int) -> tuple[list[int], tuple[Rotary, ...]]:
    """For every layer which of the rotaries is its own, and these."""
    if not family.rotary_kinds:
        return [0] * len(decoder.layers), (_rotary(decoder.rotary_emb, (), positions),)
    kinds: list[str] = list(decoder.config.layer_types)
    order = sorted(set(kinds))
    return [order.index(kind) for kind in kinds], tuple(_rotary(decoder.rotary_emb, (kind,), positions) for kind in order)


def _rotary(embedding: nn.Module, kind: tuple[str, ...], positions: int) -> Rotary:
    blocks = list(_angles(embedding, kind, positions))
    return Rotary(torch.cat([cos for cos, _ in blocks]), torch.cat([sin for _, sin in blocks]))


def _angles(embedding: nn.Module, kind: tuple[str, ...], positions: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """[positions, head_dim / 2] each, block by block: both halves of a head turn by the same angles."""
    for start in range(0, positions, _ROTARY_BLOCK):
        at = torch.arange(start, min(start + _ROTARY_BLOCK, positions))[None]
        cos, sin = embedding(torch.zeros(1), at, *kind)
        half = cos.shape[2] // 2
        yield cos[0, :, :half].clone(), sin[0, :, :half].clone()
