"""Layers of a step with many tokens: a unit is a block of tokens on its way through all products before or behind attention."""

from __future__ import annotations

from numba import njit

from moonpool.engine.compiled import vectors
from moonpool.engine.compiled.lanes import FLAGS, INLINE
from moonpool.engine.compiled.phases import finish, flag_of, take, unit_of, units_of
from moonpool.engine.compiled.products import ADD, BLOCK, GATE, STORE, keys_values, norm_rows, product, set_of, settled


@njit(**FLAGS)
def write_by_tokens(model, layer, work, index, row, thread, own):
    threads, here, before = work.threads, set_of(work, index), set_of(work, index - 1) + work.states
    outputs, units = (model.heads + 2 * model.kv_heads) * model.head_dim, units_of(work.tokens, 1, BLOCK, threads)
    normed, qkv = own + model.own_normed, own + model.own_qkv
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        token, last = unit_of(work.tokens, 1, BLOCK, threads, units, unit)
        norm_rows(model, before + token * model.hidden * 4, last - token, layer.attention_norm, normed)
        whole = product(
            STORE, model, work, layer.qkv, layer.qkv_bias, normed, model.hidden, 0, qkv, outputs, last - token, 0,
            outputs // 16, own + model.own_tile, flag_of(row, threads, unit),
        )  # fmt: skip
        if whole:
            keys_values(model, layer, work, here, index, qkv, token, last, own)
            finish(row, threads, unit)


@njit(**INLINE)
def _back_by_tokens(model, work, weights, bias, x, inputs, after, tokens, flag, own):
    """Added to this thread's own states."""
    states, mixed, tile, groups = own + model.own_states, own + model.own_mixed, own + model.own_tile, model.hidden // 16
    kind, place = (STORE, mixed) if after else (ADD, states)
    if not product(kind, model, work, weights, bias, x, inputs, states, place, model.hidden, tokens, 0, groups, tile, flag):
        return False
    if after:
        for t in range(tokens):
            at = t * model.hidden * 4
            settled(model, mixed + at, states + at, after, states + at, own + model.own_row)
    return True


@njit(**FLAGS)
def _mix_block(model, layer, here, before, work, token, tokens, flag, own):
    """Of ``tokens`` tokens from ``token`` on. False: somebody else has done them meanwhile."""
    states, normed, gated = own + model.own_states, own + model.own_normed, own + model.own_gated
    width, inner, vectors_in = model.heads * model.head_dim, model.intermediate, tokens * model.hidden // 16
    vectors.copy(before + token * model.hidden * 4, vectors_in, states)
    attended = here + work.attended + token * width * 2
    if not _back_by_tokens(
        model, work, layer.out, layer.out_bias, attended, width, layer.after_attention_norm, tokens, flag, own
    ):  # fmt: skip
        return False
    norm_rows(model, states, tokens, layer.mlp_norm, normed)
    if not product(
        GATE, model, work, layer.gate_up, layer.gate_up_bias, normed, model.hidden, 0, gated, inner, tokens, 0, inner // 8,
        own + model.own_tile, flag,
    ):  # fmt: skip
        return False
    if not _back_by_tokens(model, work, layer.down, layer.down_bias, gated, inner, layer.after_mlp_norm, tokens, flag, own):
        return False
    vectors.copy(states, vectors_in, here + work.states + token * model.hidden * 4)
    return True


@njit(**FLAGS)
def mix_by_tokens(model, layer, work, index, row, thread, own):
    threads, units = work.threads, units_of(work.tokens, 1, BLOCK, work.threads)
    here, before = set_of(work, index), set_of(work, index - 1) + work.states
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        token, last = unit_of(work.tokens, 1, BLOCK, threads, units, unit)
        if _mix_block(model, layer, here, before, work, token, last - token, flag_of(row, threads, unit), own):
            finish(row, threads, unit)
