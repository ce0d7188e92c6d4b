"""A recipe cut into shares against the whole one, and what each number of ranks allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from moonpool.engine.recipe import Experts, Layer, Projection, Recipe
from moonpool.engine.tensor_parallel.sharding import Share, columns, heads_unfit, shared, shared_layer, unfit

HIDDEN, DIM = 12, 4


def whole(heads: int, kv_heads: int, width: int, experts: int, vocabulary: int, bias: bool, seed: int) -> Recipe:
    draw = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def projection(outputs: int, inputs: int) -> Projection:
        return Projection(some(outputs, inputs), some(outputs) if bias else None)

    chosen = Experts(some(experts, HIDDEN), 2, True, some(experts, 2 * width, HIDDEN), some(experts, HIDDEN, width))
    layer = Layer(
        attention_norm=some(HIDDEN),
        qkv=projection((heads + 2 * kv_heads) * DIM, HIDDEN),
        query_norm=None,
        key_norm=None,
        out=projection(HIDDEN, heads * DIM),
        after_attention_norm=None,
        mlp_norm=some(HIDDEN),
        gate_up=projection(2 * width, HIDDEN),
        down=projection(HIDDEN, width),
        after_mlp_norm=None,
        window=None,
        rotary=0,
        experts=chosen if experts else None,
    )
    return Recipe(
        hidden=HIDDEN,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=DIM,
        intermediate=width,
        vocabulary=vocabulary,
        eps=1e-6,
        activation="silu",
        scaling=1.0,
        attention_softcap=None,
        embedding=some(vocabulary, HIDDEN),
        embedding_scale=1.0,
        layers=(layer,),
        rotaries=(),
        final_norm=some(HIDDEN),
        head=projection(vocabulary, HIDDEN),
        logits_softcap=None,
    )


def attention(recipe: Recipe, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """What a layer's attention would add, each query head looking at the K/V head that it shares."""
    qkv = functional.linear(x, layer.qkv.weight, layer.qkv.bias).view(len(x), -1, DIM)
    query, key, value = qkv.split((recipe.heads, recipe.kv_heads, recipe.kv_heads), dim=1)
    share = recipe.heads // recipe.kv_heads
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    weights = torch.einsum("qhd,khd->hqk", query, key).softmax(2)
    mixed = torch.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
    return functional.linear(mixed, layer.out.weight, layer.out.bias)


def mlp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    assert layer.gate_up is not None and layer.down is not None
    gate, up = functional.linear(x, layer.gate_up.weight, layer.gate_up.bias).chunk(2, dim=1)
    return functional.linear(functional.silu(gate) * up, layer.down.weight, layer.down.bias)


def of_experts(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """All of them, so that none is left out of the comparison."""
    gate, up = torch.einsum("th,eoh->eto", x, experts.gate_up).chunk(2, dim=2)
    return torch.einsum("etw,ehw->th", functional.silu(gate) * up, experts.down)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [(2, 2, 2), (2, 4, 8), (4, 1, 8), (4, 2, 8), (3, 3, 6), (4, 8, 8), (8, 2, 8), (2, 3, 9), (3, 8, 8), (4, 7, 14)]
    ),
    st.integers(8, 20),
    st.sampled_from([0, 3]),
    st.integers(1, 23),
    st.booleans(),
    st.integers(0, 1 << 16),
)
def test_what_the_ranks_add_is_what_the_whole_layer_adds(
    counts: tuple[int, int, int], width: int, experts: int, vocabulary: int, bias: bool, seed: int
) -> None:
    ranks, kv_heads, heads = counts
    recipe = whole(heads, kv_heads, width, experts, vocabulary, bias, seed)
    assert unfit(recipe, ranks) is None
    x = torch.randn((5, HIDDEN), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    shares = [Share(rank, ranks) for rank in range(ranks)]
    layers = [shared_layer(recipe, recipe.layers[0], one) for one in shares]
    parts = [shared(recipe, one, (layer,)) for one, layer in zip(shares, layers, strict=True)]

    want = attention(recipe, recipe.layers[0], x)
    torch.testing.assert_close(sum(attention(p, p.layers[0], x) for p in parts), want)
    torch.testing.assert_close(sum(mlp(layer, x) for layer in layers), mlp(recipe.layers[0], x))
    if recipe.layers[0].experts is not None:
        got = sum(of_experts(layer.experts, x) for layer in layers if layer.experts)
        torch.testing.assert_close(got, of_experts(recipe.layers[0].experts, x))

    logits = torch.cat([functional.linear(x, p.head.weight, p.head.bias) for p in parts], dim=1)
    assert logits.shape[1] == ranks * columns(vocabulary, ranks)
    torch.testing.assert_close(logits[:, :vocabulary], functional.linear(x, recipe.head.weight, recipe.head.bias))
    assert torch.equal(parts[0].embedding, recipe.embedding)
    assert all(not len(p.embedding) for p in parts[1:])


def test_every_kv_head_is_somebodys_and_query_heads_find_theirs() -> None:
    for heads, kv_heads, ranks in ((8, 8, 2), (8, 4, 4), (8, 2, 4), (8, 1, 8), (12, 3, 6), (9, 3, 2), (14, 7, 4)):
        seen = set()
        for rank in range(ranks):
            share = Share(rank, ranks)
            query, own = share.heads(heads, kv_heads), share.kv_heads(kv_heads)
            assert {head * kv_heads // heads for head in query} == set(own)
            seen |= set(own)
        assert seen == set(range(kv_heads))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "why"),
    [
        (8, 8, 2, None),
        (8, 2, 4, None),
        (8, 1, 2, None),
        (6, 3, 3, None),
        (9, 3, 2, None),
        (8, 8, 3, None),
        (7, 1, 2, "7 attention heads do not divide among 2 ranks"),
        (12, 3, 4, "4 ranks are more than the 3 K/V heads, and no multiple of them"),
    ],
)
def test_head_counts_that_divide_and_that_do_not(heads: int, kv_heads: int, ranks: int, why: str | None) -> None:
    got = heads_unfit(heads, kv_heads, ranks)
    assert got is None if why is None else why in (got or "")


def test_mlps_too_narrow_are_named() -> None:
    assert unfit(whole(4, 4, 3, 0, 5, False, 0), 4) == "MLPs of 3 columns are too narrow for 4 ranks"
