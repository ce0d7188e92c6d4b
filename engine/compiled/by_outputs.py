"""Layers of a step with few tokens: a unit is some outputs of a product for all tokens, so that weights are read once."""

from __future__ import annotations

from numba import njit

from moonpool.engine.compiled.lanes import FLAGS
from moonpool.engine.compiled.phases import finish, flag_of, take, unit_of, units_of
from moonpool.engine.compiled.products import ADD, FEW_ROWS, GATE, STORE, WIDE, keys_values, norm_rows, product, set_of, settled


@njit(**FLAGS)
def write_by_outputs(model, layer, work, index, row, thread, own):
    threads, tokens, here = work.threads, work.tokens, set_of(work, index)
    outputs = (model.heads + 2 * model.kv_heads) * model.head_dim
    groups, ready = outputs // 16, False
    units = units_of(groups, 1, WIDE, threads)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            break
        if not ready:
            norm_rows(model, set_of(work, index - 1) + work.states, tokens, layer.attention_norm, own + model.own_normed)
            ready = True
        first, last = unit_of(groups, 1, WIDE, threads, units, unit)
        product(
            STORE, model, work, layer.qkv, layer.qkv_bias, own + model.own_normed, model.hidden, 0, here + work.qkv, outputs,
            tokens, first, last, own + model.own_tile, flag_of(row, threads, unit),
        )  # fmt: skip
        finish(row, threads, unit)
    row += work.row_bytes
    units = units_of(tokens, 1, FEW_ROWS, threads)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        first, last = unit_of(tokens, 1, FEW_ROWS, threads, units, unit)
        keys_values(model, layer, work, here, index, here + work.qkv + first * outputs * 4, first, last, own)
        finish(row, threads, unit)


@njit(**FLAGS)
def _back_by_outputs(model, work, weights, bias, x, inputs, base, out, mixed, after, row, thread, own):
    """A product that returns to the residual stream, added to ``base``; by way of ``mixed`` where a norm comes in between.

    Two phases.
    """
    threads, tokens, groups = work.threads, work.tokens, model.hidden // 16
    units = units_of(groups, 1, WIDE, threads)
    kind, place = (STORE, mixed) if after else (ADD, out)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            break
        first, last = unit_of(groups, 1, WIDE, threads, units, unit)
        tile, flag = own + model.own_tile, flag_of(row, threads, unit)
        product(kind, model, work, weights, bias, x, inputs, base, place, model.hidden, tokens, first, last, tile, flag)
        finish(row, threads, unit)
    if not after:
        return
    row += work.row_bytes
    units = units_of(tokens, 1, FEW_ROWS, threads)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        first, last = unit_of(tokens, 1, FEW_ROWS, threads, units, unit)
        for t in range(first, last):
            at = t * model.hidden * 4
            settled(model, mixed + at, base + at, after, out + at, own + model.own_row)
        finish(row, threads, unit)


@njit(**FLAGS)
def _gate_by_outputs(model, layer, work, states, out, row, thread, own):
    threads, tokens, groups = work.threads, work.tokens, model.intermediate // 8
    units, ready = units_of(groups, 2, WIDE, threads), False
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        if not ready:
            norm_rows(model, states, tokens, layer.mlp_norm, own + model.own_normed)
            ready = True
        first, last = unit_of(groups, 2, WIDE, threads, units, unit)
        product(
            GATE, model, work, layer.gate_up, layer.gate_up_bias, own + model.own_normed, model.hidden, 0, out,
            model.intermediate, tokens, first, last, own + model.own_tile, flag_of(row, threads, unit),
        )  # fmt: skip
        finish(row, threads, unit)


@njit(**FLAGS)
def mix_by_outputs(model, layer, work, index, row, thread, own):
    """Five phases."""
    here, before = set_of(work, index), set_of(work, index - 1) + work.states
    halfway, states, mixed, gated = here + work.halfway, here + work.states, here + work.mixed, here + work.gated
    width, attended, inner = model.heads * model.head_dim, here + work.attended, model.intermediate
    after = layer.after_attention_norm
    _back_by_outputs(
        model, work, layer.out, layer.out_bias, attended, width, before, halfway, mixed, after, row, thread, own
    )  # fmt: skip
    row += 2 * work.row_bytes
    _gate_by_outputs(model, layer, work, halfway, gated, row, thread, own)
    row += work.row_bytes
    after, mixed = layer.after_mlp_norm, here + work.mixed_again
    _back_by_outputs(
        model, work, layer.down, layer.down_bias, gated, inner, halfway, states, mixed, after, row, thread, own
    )  # fmt: skip
