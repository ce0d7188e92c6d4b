"""What the compiled step needs of model and layout."""

from __future__ import annotations

import torch

from moonpool.core.layout import KVLayout
from moonpool.engine.compiled.cpu import unfit_cpu
from moonpool.engine.compiled.matrix import TILE_INPUTS
from moonpool.engine.compiled.tiles import TILE_KEYS
from moonpool.engine.recipe import Recipe

QUERY_ROWS = 384  # queries times query heads per K/V head that are attended together; whole tiles of the matrix unit


def unfit(recipe: Recipe, layout: KVLayout) -> str | None:
    """Why the compiled step cannot compute this here; None: it can."""
    if (machine := unfit_cpu()) is not None:
        return machine
    if recipe.dtype is not torch.bfloat16:
        return f"model.dtype is {layout.dtype}, it computes bfloat16"
    if layout.block_tokens % TILE_KEYS:
        return f"engine.block_tokens {layout.block_tokens} is not a multiple of {TILE_KEYS}"
    if any(layer.experts is not None for layer in recipe.layers):
        return "the model has layers of experts, it computes dense MLPs"
    sizes = {
        "head_dim": (recipe.head_dim, 32),
        "hidden_size": (recipe.hidden, 16),
        "intermediate_size": (recipe.intermediate, 16),
        "(heads + 2 kv_heads) * head_dim": ((recipe.heads + 2 * recipe.kv_heads) * recipe.head_dim, 16),
    }
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"{name} {size} is not a multiple of {unit}"
    if recipe.heads // recipe.kv_heads > QUERY_ROWS:
        return f"{recipe.heads // recipe.kv_heads} query heads share one K/V head, {QUERY_ROWS} may"
    return None


def suits_matrix_unit(recipe: Recipe) -> bool:
    """Whether all products of this model can be computed in a matrix unit; head_dim is as it has to be anyway."""
    inputs = recipe.hidden, recipe.heads * recipe.head_dim, recipe.intermediate
    return not any(size % TILE_INPUTS for size in inputs)
