"""What each of several ranks computes of a recipe: some heads, some columns of every MLP, some rows of the head (Shoeybi et
al., "Megatron-LM", 2019, section 3).

A rank has all of ``norms``, angles and routers. Its ``qkv`` and ``gate_up`` give the outputs that are its own; its ``out`` and
``down`` take those as inputs, so that the sum over all ranks is what the whole layer adds. Their biases are rank 0's alone: a
sum has them once. The embedding is rank 0's, too: what a step begins with travels to the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moonpool.engine.recipe import Experts, Layer, Projection, Recipe


@dataclass(frozen=True, slots=True)
class Share:
    """That of ``rank`` among ``ranks``."""

    rank: int
    ranks: int

    def part(self, count: int) -> range:
        """Of ``count`` things, at least one for each rank; where they do not divide, some ranks have one more."""
        return range(self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks)

    def kv_heads(self, count: int) -> range:
        """Where there are fewer K/V heads than ranks, several ranks have the same one."""
        first = self.rank * count // self.ranks
        return self.part(count) if count >= self.ranks else range(first, first + 1)

    def heads(self, count: int, kv_heads: int) -> range:
        """Query heads: those that share this rank's K/V heads, or as many of them as other ranks with the same one have."""
        return _scaled(self.kv_heads(kv_heads), count // kv_heads) if kv_heads >= self.ranks else self.part(count)

    def head_rows(self, vocabulary: int) -> range:
        """Rows of the head, which need not divide: the last ranks may have fewer, or none."""
        size = columns(vocabulary, self.ranks)
        return range(min(self.rank * size, vocabulary), min((self.rank + 1) * size, vocabulary))


def columns(vocabulary: int, ranks: int) -> int:
    """Logits that one rank computes, those of no id included."""
    return -(-vocabulary // ranks)


def heads_unfit(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why attention cannot be shared; None: it can."""
    if kv_heads >= ranks:
        return None
    if ranks % kv_heads:
        return f"{ranks} ranks are more than the {kv_heads} K/V heads, and no multiple of them"
    return f"{heads} attention heads do not divide among {ranks} ranks" if heads % ranks else None


def unfit(recipe: Recipe, ranks: int) -> str | None:
    """Why ``recipe`` cannot be shared; None: it can."""
    if reason := heads_unfit(recipe.heads, recipe.kv_heads, ranks):
        return reason
    widths = {layer.down.weight.shape[1] for layer in recipe.layers if layer.down is not None}
    widths |= {layer.experts.down.shape[2] for layer in recipe.layers if layer.experts is not None}
    return f"MLPs of {min(widths)} columns are too narrow for {ranks} ranks" if min(widths) < ranks else None


def shared(recipe: Recipe, share: Share, layers: tuple[Layer, ...]) -> Recipe:
    """What is not of one layer, with ``layers`` of this rank. Of tensors that are cut these are copies.

    Rank 0 has the embedding, others none of its rows.
    """
    rows = share.head_rows(recipe.vocabulary)
    return replace(
        recipe,
        heads=len(share.heads(recipe.heads, recipe.kv_heads)),
        kv_heads=len(share.kv_heads(recipe.kv_heads)),
        intermediate=len(share.part(recipe.intermediate)),
        embedding=recipe.embedding if share.rank == 0 else recipe.embedding[:0].clone(),
        layers=layers,
        head=_padded(_outputs(recipe.head, [rows]), columns(recipe.vocabulary, share.ranks)),
    )


def shared_layer(recipe: Recipe, layer: Layer, share: Share) -> Layer:
    """This rank's part of one layer of ``recipe``, the whole one."""
    dim, first = recipe.head_dim, share.rank == 0
    query, key = share.heads(recipe.heads, recipe.kv_heads), share.kv_heads(recipe.kv_heads)
    qkv = [_scaled(query, dim), _scaled(_moved(key, recipe.heads), dim)]
    qkv.append(_scaled(_moved(key, recipe.heads + recipe.kv_heads), dim))
    return replace(
        layer,
        qkv=_outputs(layer.qkv, qkv),
        out=_inputs(layer.out, _scaled(query, dim), bias=first),
        gate_up=None if layer.gate_up is None else _outputs(layer.gate_up, _halves(layer.gate_up.weight.shape[0], share)),
        down=None if layer.down is None else _inputs(layer.down, share.part(layer.down.weight.shape[1]), bias=first),
        experts=None if layer.experts is None else _experts(layer.experts, share),
    )


def let_go(layer: Layer) -> None:
    """The weights of a whole layer that everybody has his part of."""
    for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
        if projection is not None:
            projection.let_go()
    if layer.experts is not None:
        layer.experts.let_go()


def _experts(experts: Experts, share: Share) -> Experts:
    gate, up = _halves(experts.gate_up.shape[1], share)
    both = torch.cat([experts.gate_up[:, gate.start : gate.stop], experts.gate_up[:, up.start : up.stop]], dim=1)
    part = share.part(experts.down.shape[2])
    return replace(experts, gate_up=both, down=experts.down[:, :, part.start : part.stop].clone())


def _halves(count: int, share: Share) -> list[range]:
    """Outputs of a merged gate and up projection that has ``count`` of them."""
    part = share.part(count // 2)
    return [part, _moved(part, count // 2)]


def _outputs(projection: Projection, rows: list[range]) -> Projection:
    weight = torch.cat([projection.weight[some.start : some.stop] for some in rows])
    bias = None if projection.bias is None else torch.cat([projection.bias[some.start : some.stop] for some in rows])
    return Projection(weight, bias)


def _inputs(projection: Projection, some: range, *, bias: bool) -> Projection:
    weight = projection.weight[:, some.start : some.stop].clone(memory_format=torch.contiguous_format)
    return Projection(weight, projection.bias if bias else None)


def _padded(projection: Projection, outputs: int) -> Projection:
    """With zeros, to as many ``outputs`` as every rank has."""
    short = outputs - projection.weight.shape[0]
    if not short:
        return projection
    weight = torch.cat([projection.weight, projection.weight.new_zeros((short, projection.weight.shape[1]))])
    bias = None if projection.bias is None else torch.cat([projection.bias, projection.bias.new_zeros(short)])
    return Projection(weight, bias)


def _scaled(some: range, size: int) -> range:
    return range(some.start * size, some.stop * size)


def _moved(some: range, by: int) -> range:
    return range(some.start + by, some.stop + by)
