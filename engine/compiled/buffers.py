"""Where the numbers of a step lie: a ring of sets that layers use in turns, and what every thread has for itself."""

from __future__ import annotations

from moonpool.engine.compiled.places import scratch_bytes
from moonpool.engine.compiled.products import BLOCK, TILE_BYTES
from moonpool.engine.compiled.step import FEW_TOKENS
from moonpool.engine.recipe import Recipe

RING_BYTES = 4 << 20  # more sets, up to one for each layer, as long as they fit in this: it is to stay in the caches
LEAST_SETS = 3  # so that a thread may be a layer ahead of another
_LINE, _PAGE = 64, 4096

Places = dict[str, int]


def places_in_set(recipe: Recipe, tokens: int, partials: int) -> tuple[Places, int]:
    """Offsets of one set's buffers, as ``records.WORK`` names them, and bytes of a set. ``partials``: float32."""
    queries = recipe.heads * recipe.head_dim * 2
    sizes = {
        "states": tokens * recipe.hidden * 4,
        "queries": tokens * queries,
        "attended": tokens * queries,
        "partials": partials * 4,
    }
    if tokens <= FEW_TOKENS:
        mixed = tokens * recipe.hidden * 4 * any(layer.after_mlp_norm is not None for layer in recipe.layers)
        sizes |= {
            "qkv": tokens * width(recipe) * 4,
            "halfway": tokens * recipe.hidden * 4,
            "gated": tokens * recipe.intermediate * 2,
            "mixed": mixed,
            "mixed_again": mixed,
        }
    return _placed(sizes, 0, _LINE)


def places_of_thread(recipe: Recipe) -> tuple[Places, int]:
    """Offsets of one thread's buffers, as ``records.MODEL`` names them, and their bytes; attention's come first."""
    sizes = {
        "own_tile": TILE_BYTES,
        "own_row": max(recipe.hidden, recipe.head_dim) * 4,
        "own_normed": BLOCK * recipe.hidden * 2,
        "own_qkv": BLOCK * width(recipe) * 4,
        "own_states": BLOCK * recipe.hidden * 4,
        "own_mixed": BLOCK * recipe.hidden * 4,
        "own_gated": BLOCK * recipe.intermediate * 2,
    }
    return _placed(sizes, scratch_bytes(recipe.head_dim), _PAGE)


def width(recipe: Recipe) -> int:
    """Of q, k and v together."""
    return (recipe.heads + 2 * recipe.kv_heads) * recipe.head_dim


def widest_input(recipe: Recipe) -> int:
    """Of any product of a layer."""
    return max(recipe.hidden, recipe.heads * recipe.head_dim, recipe.intermediate)


def _placed(sizes: Places, at: int, unit: int) -> tuple[Places, int]:
    """One after another from ``at`` on, each at a cache line; the end is a multiple of ``unit``."""
    places = {}
    for name, size in sizes.items():
        places[name] = at = -(-at // _LINE) * _LINE
        at += size
    return places, -(-at // unit) * unit
