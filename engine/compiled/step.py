"""All layers of a step, on every thread of the crew at once.

Up to ``FEW_TOKENS`` tokens the threads share out the outputs of each product, so that weights are read once, and meet after
each. With more tokens they share out the tokens instead, and meet only around attention, which is shared out task by task.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from moonpool.engine.compiled import tiles, vectors
from moonpool.engine.compiled.attention import attend, merge, scratch_bytes
from moonpool.engine.compiled.crew import await_work, barrier, begin
from moonpool.engine.compiled.lanes import FLAGS, INLINE, atomic_add, word

FEW_TOKENS = 64
_BLOCK = 96  # tokens that go through the products of a layer together: they and one tile of weights stay in the L2 cache
_STORE, _ADD, _GATE = 0, 1, 2  # what becomes of a product: written, added to the residual stream, or gated
_TILE_BYTES = 6 * 64 * 4  # of one product in scratch

_p46, _p44, _p42, _p41 = (tiles.product(4, t) for t in (6, 4, 2, 1))
_p26, _p24, _p22, _p21 = (tiles.product(2, t) for t in (6, 4, 2, 1))
_p16, _p14, _p12, _p11 = (tiles.product(1, t) for t in (6, 4, 2, 1))


def thread_scratch(head_dim: int) -> int:
    """Bytes of one thread, a multiple of a page so that threads share no cache line."""
    return -(-(scratch_bytes(head_dim) + _TILE_BYTES) // 4096) * 4096


@njit(**INLINE)
def _tile(groups, tokens, weights, x, x_stride, inputs, bias, out, out_stride):
    if groups == 4:
        if tokens == 6:
            _p46(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 4:
            _p44(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 2:
            _p42(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _p41(weights, x, x_stride, inputs, bias, out, out_stride)
    elif groups == 2:
        if tokens == 6:
            _p26(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 4:
            _p24(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 2:
            _p22(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _p21(weights, x, x_stride, inputs, bias, out, out_stride)
    else:
        if tokens == 6:
            _p16(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 4:
            _p14(weights, x, x_stride, inputs, bias, out, out_stride)
        elif tokens == 2:
            _p12(weights, x, x_stride, inputs, bias, out, out_stride)
        else:
            _p11(weights, x, x_stride, inputs, bias, out, out_stride)


@njit(**FLAGS)
def _product(kind, model, weights, bias, x, inputs, out, outputs, token, last_token, group, last_group, scratch):
    """Of tokens [token, last_token) with the groups [group, last_group) of ``weights``, to rows of ``outputs`` in ``out``.

    ``_GATE``: groups come by two, gate and up, and ``out`` is bf16 with half as many outputs.
    """
    first_token = token
    while group < last_group:
        wide = 4 if last_group - group >= 4 else (2 if last_group - group >= 2 else 1)
        packed, start = weights + group * inputs * 32, bias + group * 64
        token = first_token
        while token < last_token:
            left = last_token - token
            many = 4 if left == 8 else (6 if left >= 6 else (4 if left >= 4 else (2 if left >= 2 else 1)))
            here, column = x + token * inputs * 2, group * 16
            if kind == _STORE:
                place = out + (token * outputs + column) * 4
                _tile(wide, many, packed, here, inputs * 2, inputs, start, place, outputs * 4)
            else:
                _tile(wide, many, packed, here, inputs * 2, inputs, start, scratch, 64 * 4)
                for i in range(many):
                    if kind == _ADD:
                        vectors.add(out + ((token + i) * outputs + column) * 4, scratch + i * 256, wide)
                    else:
                        place = out + ((token + i) * outputs + column // 2) * 2
                        vectors.gate(scratch + i * 256, wide // 2, model.gate_linear, model.gate_cubic, place)
            token += many
        group += wide


@njit(**INLINE)
def _first(n, thread, threads):
    """Of ``n`` things, the first of a thread's; its last one comes before the first of the next thread's."""
    return n * thread // threads


@njit(**INLINE)
def _embed(model, work, token, last):
    for t in range(token, last):
        row = model.embedding + word(work.ids + 8 * t) * model.hidden * 2
        vectors.widen(row, model.hidden // 16, model.embedding_scale, work.states + t * model.hidden * 4)


@njit(**INLINE)
def _normed(model, work, weight, token, last):
    for t in range(token, last):
        vectors.norm_narrow(
            work.states + t * model.hidden * 4, model.hidden, weight, model.eps, work.normed + t * model.hidden * 2
        )


@njit(**FLAGS)
def _keys_values(model, layer, work, index, token, last):
    """Of the tokens' q, k, v: norms of heads, rotary embedding, K and V into pages, queries to bf16."""
    dim, heads = model.head_dim, model.heads + model.kv_heads
    for t in range(token, last):
        row = work.qkv + t * (heads + model.kv_heads) * dim * 4
        position = word(work.positions + 8 * t)
        cos, sin = layer.cos + position * dim * 2, layer.sin + position * dim * 2
        slot = model.pages + index * model.layer_bytes + word(work.places + 8 * t)
        for head in range(heads):
            at = row + head * dim * 4
            weight = layer.query_norm if head < model.heads else layer.key_norm
            if weight:
                vectors.norm(at, dim, weight, model.eps)
            if head < model.heads:
                vectors.rotate(at, dim // 32, cos, sin, work.queries + (t * model.heads + head) * dim * 2)
            else:
                vectors.rotate(at, dim // 32, cos, sin, slot + (head - model.heads) * model.plane_bytes)
        for head in range(model.kv_heads):
            place = slot + (model.kv_heads + head) * model.plane_bytes
            vectors.narrow(row + (heads + head) * dim * 4, dim // 16, np.float32(1.0), place)


@njit(**INLINE)
def _qkv(model, layer, work, token, last, group, last_group, scratch):
    weights, bias, outputs = layer.qkv, layer.qkv_bias, (model.heads + 2 * model.kv_heads) * model.head_dim
    x, out = work.normed, work.qkv
    _product(_STORE, model, weights, bias, x, model.hidden, out, outputs, token, last, group, last_group, scratch)


@njit(**INLINE)
def _back(model, work, weights, bias, x, inputs, after, token, last, group, last_group, scratch):
    """A product that returns to the residual stream: added at once, or by way of ``mixed`` where a norm comes in between."""
    out = work.mixed if after else work.states
    kind = _STORE if after else _ADD
    _product(kind, model, weights, bias, x, inputs, out, model.hidden, token, last, group, last_group, scratch)


@njit(**INLINE)
def _settle(model, work, after, token, last):
    """Norm and add what ``_back`` left in ``mixed``."""
    for t in range(token, last):
        row = work.mixed + t * model.hidden * 4
        vectors.norm(row, model.hidden, after, model.eps)
        vectors.add(work.states + t * model.hidden * 4, row, model.hidden // 16)


@njit(**INLINE)
def _gate_up(model, layer, work, token, last, group, last_group, scratch):
    weights, bias, x, out = layer.gate_up, layer.gate_up_bias, work.normed, work.gated
    _product(_GATE, model, weights, bias, x, model.hidden, out, model.intermediate, token, last, group, last_group, scratch)


@njit(**FLAGS)
def _write_by_outputs(model, layer, work, index, thread, scratch, sync):
    threads, after = work.threads, thread + 1
    mine, end = _first(work.tokens, thread, threads), _first(work.tokens, after, threads)
    _normed(model, work, layer.attention_norm, mine, end)
    barrier(sync, threads)
    groups = (model.heads + 2 * model.kv_heads) * model.head_dim // 16
    _qkv(model, layer, work, 0, work.tokens, _first(groups, thread, threads), _first(groups, after, threads), scratch)
    barrier(sync, threads)
    _keys_values(model, layer, work, index, mine, end)


@njit(**FLAGS)
def _mix_by_outputs(model, layer, work, thread, scratch, sync):
    threads, after, tokens = work.threads, thread + 1, work.tokens
    mine, end = _first(tokens, thread, threads), _first(tokens, after, threads)
    group, last = _first(model.hidden // 16, thread, threads), _first(model.hidden // 16, after, threads)
    width, normed = model.heads * model.head_dim, layer.after_attention_norm
    _back(model, work, layer.out, layer.out_bias, work.attended, width, normed, 0, tokens, group, last, scratch)
    barrier(sync, threads)
    if normed:
        _settle(model, work, normed, mine, end)
    _normed(model, work, layer.mlp_norm, mine, end)
    barrier(sync, threads)
    pair, last_pair = _first(model.intermediate // 16, thread, threads), _first(model.intermediate // 16, after, threads)
    _gate_up(model, layer, work, 0, tokens, 2 * pair, 2 * last_pair, scratch)
    barrier(sync, threads)
    width, normed = model.intermediate, layer.after_mlp_norm
    _back(model, work, layer.down, layer.down_bias, work.gated, width, normed, 0, tokens, group, last, scratch)
    barrier(sync, threads)
    if normed:
        _settle(model, work, normed, mine, end)
        barrier(sync, threads)


@njit(**FLAGS)
def _write_by_tokens(model, layer, work, index, thread, scratch):
    first, end = _first(work.tokens, thread, work.threads), _first(work.tokens, thread + 1, work.threads)
    groups = (model.heads + 2 * model.kv_heads) * model.head_dim // 16
    for token in range(first, end, _BLOCK):
        last = min(token + _BLOCK, end)
        _normed(model, work, layer.attention_norm, token, last)
        _qkv(model, layer, work, token, last, 0, groups, scratch)
        _keys_values(model, layer, work, index, token, last)


@njit(**FLAGS)
def _mix_by_tokens(model, layer, work, thread, scratch):
    first, end = _first(work.tokens, thread, work.threads), _first(work.tokens, thread + 1, work.threads)
    groups, width, inner = model.hidden // 16, model.heads * model.head_dim, model.intermediate
    for token in range(first, end, _BLOCK):
        last = min(token + _BLOCK, end)
        normed = layer.after_attention_norm
        _back(model, work, layer.out, layer.out_bias, work.attended, width, normed, token, last, 0, groups, scratch)
        if normed:
            _settle(model, work, normed, token, last)
        _normed(model, work, layer.mlp_norm, token, last)
        _gate_up(model, layer, work, token, last, 0, inner // 8, scratch)
        normed = layer.after_mlp_norm
        _back(model, work, layer.down, layer.down_bias, work.gated, inner, normed, token, last, 0, groups, scratch)
        if normed:
            _settle(model, work, normed, token, last)


@njit(**FLAGS)
def _attention(model, layer, work, index, tasks, merges, thread, scratch, sync):
    """All tasks, each taken by whoever is free."""
    while True:
        taken = atomic_add(work.counters + 8 * index, 1)
        if taken >= work.task_count:
            break
        attend(model, work, index, layer.window, tasks[word(work.order + 8 * taken)], scratch)
    barrier(sync, work.threads)
    if work.merge_count:
        group = model.heads // model.kv_heads
        for i in range(work.merge_count):
            for row in range(thread, merges[i].count * group, work.threads):
                merge(model, work, merges[i], row)
        barrier(sync, work.threads)


@njit(**INLINE)
def _logits(model, work, thread, scratch, sync):
    threads, count, after = work.threads, work.wanted_count, thread + 1
    for i in range(_first(count, thread, threads), _first(count, after, threads)):  # the rows of ``normed`` are free by now
        row = work.states + word(work.wanted + 8 * i) * model.hidden * 4
        vectors.norm_narrow(row, model.hidden, model.final_norm, model.eps, work.normed + i * model.hidden * 2)
    barrier(sync, work.threads)
    groups, x, outputs = model.vocabulary // 16, work.normed, model.vocabulary
    group, last = _first(groups, thread, threads), _first(groups, after, threads)
    weights, bias = model.head, model.head_bias
    _product(_STORE, model, weights, bias, x, model.hidden, work.logits, outputs, 0, count, group, last, scratch)


@njit(**INLINE)
def _run(models, layers, works, tasks, merges, sync, thread):
    """The share of one thread in what the record asks for; returns when all threads have done theirs."""
    model, work = models[0], works[0]
    scratch = work.scratch + thread * model.scratch_bytes
    product = scratch + model.scratch_bytes - _TILE_BYTES
    few = work.tokens <= FEW_TOKENS
    if work.embeds:
        _embed(model, work, _first(work.tokens, thread, work.threads), _first(work.tokens, thread + 1, work.threads))
        barrier(sync, work.threads)
    for index in range(work.first_layer, work.last_layer):
        layer = layers[index]
        if work.writes:
            if few:
                _write_by_outputs(model, layer, work, index, thread, product, sync)
            else:
                _write_by_tokens(model, layer, work, index, thread, product)
            barrier(sync, work.threads)
        if work.mixes:
            _attention(model, layer, work, index, tasks, merges, thread, scratch, sync)
            if few:
                _mix_by_outputs(model, layer, work, thread, product, sync)
            else:
                _mix_by_tokens(model, layer, work, thread, product)
    if work.ends:
        barrier(sync, work.threads)
        _logits(model, work, thread, product, sync)
    barrier(sync, work.threads)


@njit(**FLAGS)
def run(models, layers, works, tasks, merges, sync, thread):
    """Thread 0: do what ``works[0]`` asks for, together with the helpers. A helper: its life, until the crew is dismissed."""
    seen = 0
    if thread == 0 and works[0].threads > 1:
        begin(sync)
    while True:
        if thread > 0:
            seen = await_work(sync, seen)
            if seen < 0:
                return
        _run(models, layers, works, tasks, merges, sync, thread)
        if thread == 0:
            return
