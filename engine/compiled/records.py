"""What every thread of a step reads: three records of addresses (int64) and sizes. Python fills them, kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np

# Of the model: one record.
MODEL = np.dtype(
    [
        ("hidden", np.int64),
        ("heads", np.int64),
        ("kv_heads", np.int64),
        ("head_dim", np.int64),
        ("intermediate", np.int64),
        ("vocabulary", np.int64),  # rows of the packed head: whole groups
        ("embedding", np.int64),  # bf16 [vocabulary, hidden]
        ("head", np.int64),  # packed
        ("head_bias", np.int64),
        ("final_norm", np.int64),
        ("pages", np.int64),  # bf16, canonical order
        ("page_bytes", np.int64),
        ("layer_bytes", np.int64),
        ("plane_bytes", np.int64),  # K or V of one head of one page and layer
        ("block_tokens", np.int64),
        ("scratch_bytes", np.int64),  # of one thread; what follows is where in it something lies
        ("shapes", np.int64),  # of matrix registers, by rows: see ``matrix.shapes``
        ("own_tile", np.int64),  # float32: one tile of a product
        ("own_row", np.int64),  # float32 [hidden or head_dim]
        ("own_normed", np.int64),  # bf16 [block, hidden]
        ("own_qkv", np.int64),  # float32 [block, (heads + 2 kv_heads) * head_dim]
        ("own_states", np.int64),  # float32 [block, hidden]
        ("own_mixed", np.int64),  # float32 [block, hidden], for families with norms after attention and MLP
        ("own_gated", np.int64),  # bf16 [block, intermediate]
        ("eps", np.float32),
        ("embedding_scale", np.float32),
        ("score_scale", np.float32),  # of a score in an exponent of 2, after the soft cap if there is one
        ("scaling", np.float32),
        ("softcap", np.float32),  # 0: none
        ("gate_linear", np.float32),
        ("gate_cubic", np.float32),
    ],
    align=True,
)

# Of each layer.
LAYER = np.dtype(
    [
        ("attention_norm", np.int64),
        ("qkv", np.int64),
        ("qkv_bias", np.int64),
        ("query_norm", np.int64),  # 0: none, as for every norm below but mlp_norm
        ("key_norm", np.int64),
        ("out", np.int64),
        ("out_bias", np.int64),
        ("after_attention_norm", np.int64),
        ("mlp_norm", np.int64),
        ("gate_up", np.int64),  # groups of gate and up in turns
        ("gate_up_bias", np.int64),
        ("down", np.int64),
        ("down_bias", np.int64),
        ("after_mlp_norm", np.int64),
        ("window", np.int64),  # 0: none
        ("cos", np.int64),
        ("sin", np.int64),
    ],
    align=True,
)

# Of a step: one record.
WORK = np.dtype(
    [
        ("threads", np.int64),
        ("tokens", np.int64),
        ("tile_rows", np.int64),  # of the matrix unit's registers; 0: the step does not use it
        ("first_layer", np.int64),
        ("last_layer", np.int64),
        ("embeds", np.int64),  # what this call does: 0 or 1 each
        ("writes", np.int64),  # K and V of its layers
        ("mixes", np.int64),  # attention and what follows it
        ("ends", np.int64),  # logits
        ("wanted_count", np.int64),
        ("task_count", np.int64),
        ("merge_count", np.int64),
        ("ids", np.int64),  # int64 [tokens]
        ("positions", np.int64),  # int64 [tokens]
        ("places", np.int64),  # int64 [tokens]: where in a page layer a token's row of the first head is, from ``pages``
        ("wanted", np.int64),  # int64 [wanted_count]
        ("tables", np.int64),  # int64: pages of all rows, one row after another
        ("order", np.int64),  # int64 [task_count]: tasks in the order in which they are taken
        ("board", np.int64),  # rows of phases, zeros at the start
        ("row_bytes", np.int64),
        ("ring", np.int64),  # sets of buffers, which layers use in turns
        ("sets", np.int64),
        ("set_bytes", np.int64),  # of one; what follows is where in it something lies
        ("states", np.int64),  # float32 [tokens, hidden]: the residual stream after a layer
        ("queries", np.int64),  # bf16 [tokens, heads * head_dim]
        ("attended", np.int64),  # bf16 [tokens, heads * head_dim]
        ("partials", np.int64),  # float32: ranges of split tasks
        ("qkv", np.int64),  # float32 [tokens, (heads + 2 kv_heads) * head_dim]; from here on: of steps with few tokens only
        ("halfway", np.int64),  # float32 [tokens, hidden]: the residual stream after attention
        ("gated", np.int64),  # bf16 [tokens, intermediate]
        ("mixed", np.int64),  # float32 [tokens, hidden], for families with norms after attention and MLP
        ("mixed_again", np.int64),
        ("scratch", np.int64),  # of all threads
        ("last", np.int64),  # bf16 [wanted_count, hidden]
        ("logits", np.int64),  # float32 [wanted_count, vocabulary]
    ],
    align=True,
)

# Queries of one row and one K/V head against keys [begin, end).
TASK = np.dtype(
    [
        ("token", np.int64),  # first query in the batch
        ("count", np.int64),  # queries
        ("position", np.int64),  # of the first query
        ("head", np.int64),
        ("begin", np.int64),  # keys; multiples of KEY_RANGE but for the last end
        ("end", np.int64),
        ("table", np.int64),  # where the row's pages begin in ``tables``
        (
            "partial",
            np.int64,
        ),  # where its range goes in ``partials`` (in float32), -1: it has all keys and ends in ``attended``
    ],
    align=True,
)

# Ranges of one split unit, to be merged.
MERGE = np.dtype(
    [
        ("token", np.int64),
        ("count", np.int64),
        ("head", np.int64),
        ("ranges", np.int64),
        ("partial", np.int64),  # of its first range; the others follow
    ],
    align=True,
)


def one(kind: np.dtype[Any]) -> Any:
    """One record of zeros, as an array of length 1."""
    return np.zeros(1, kind)
