"""All layers of a step, on every thread of the crew at once, as phases of units (``phases``)."""

from __future__ import annotations

from numba import njit

from moonpool.engine.compiled import matrix, vectors
from moonpool.engine.compiled.attention import ask_ahead, attend, merge
from moonpool.engine.compiled.by_outputs import mix_by_outputs, write_by_outputs
from moonpool.engine.compiled.by_tokens import mix_by_tokens, write_by_tokens
from moonpool.engine.compiled.crew import await_work, begin, enter, leave
from moonpool.engine.compiled.lanes import FLAGS, INLINE, word
from moonpool.engine.compiled.matrix import HAS_MATRIX_UNIT
from moonpool.engine.compiled.phases import finish, flag_of, take, unit_of, units_of
from moonpool.engine.compiled.products import BLOCK, FEW_ROWS, STORE, WIDE, WIDE_HEAD, product, set_of

FEW_TOKENS = 64  # of a step that is shared out by outputs


@njit(**FLAGS)
def _embed(model, work, row, thread):
    threads, tokens, states = work.threads, work.tokens, set_of(work, -1) + work.states
    units = units_of(tokens, 1, BLOCK, threads)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        first, last = unit_of(tokens, 1, BLOCK, threads, units, unit)
        for t in range(first, last):
            source = model.embedding + word(work.ids + 8 * t) * model.hidden * 2
            vectors.widen(source, model.hidden // 16, model.embedding_scale, states + t * model.hidden * 4)
        finish(row, threads, unit)


@njit(**FLAGS)
def _attention(model, layer, work, index, tasks, merges, row, thread, own):
    """Two phases: tasks, the heaviest first, and what is to be merged."""
    here, threads, count = set_of(work, index), work.threads, work.task_count
    while True:
        unit = take(row, count, 1, thread, threads)
        if unit < 0:
            break
        if unit + threads < count:
            ask_ahead(model, work, index, layer.window, tasks[word(work.order + 8 * (unit + threads))])
        task = tasks[word(work.order + 8 * unit)]
        attend(model, work, here, index, layer.window, task, flag_of(row, threads, unit), own)
        finish(row, threads, unit)
    row += work.row_bytes
    while work.merge_count:
        unit = take(row, work.merge_count, threads, thread, threads)
        if unit < 0:
            return
        for line in range(merges[unit].count * (model.heads // model.kv_heads)):
            merge(model, work, here, merges[unit], line, own)
        finish(row, threads, unit)


@njit(**FLAGS)
def _logits(model, work, row, thread, own):
    """Two phases."""
    threads, count, states = work.threads, work.wanted_count, set_of(work, work.last_layer - 1) + work.states
    units = units_of(count, 1, BLOCK, threads)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            break
        first, last = unit_of(count, 1, BLOCK, threads, units, unit)
        for i in range(first, last):
            source, place = states + word(work.wanted + 8 * i) * model.hidden * 4, work.last + i * model.hidden * 2
            vectors.norm_narrow(source, model.hidden, model.final_norm, model.eps, place)
        finish(row, threads, unit)
    row += work.row_bytes
    groups = model.vocabulary // 16
    units = units_of(groups, 1, WIDE_HEAD, threads)
    while True:
        unit = take(row, units, threads, thread, threads)
        if unit < 0:
            return
        first, last = unit_of(groups, 1, WIDE_HEAD, threads, units, unit)
        product(
            STORE, model, work, model.head, model.head_bias, work.last, model.hidden, 0, work.logits, model.vocabulary, count,
            first, last, own + model.own_tile, flag_of(row, threads, unit),
        )  # fmt: skip
        finish(row, threads, unit)


def most_units(tokens: int, tasks: int, inner: int, outputs: int, vocabulary: int, threads: int) -> int:
    """An upper bound of the units of a phase. ``inner``: of gate and up together; ``outputs``: of the widest other product."""
    groups = max(inner, outputs) // 16 // WIDE, vocabulary // 16 // WIDE_HEAD
    return max(tasks, *groups, tokens // BLOCK, FEW_TOKENS // FEW_ROWS) + 2 * threads


PHASES = 9  # of a layer: two that write, two of attention, five that mix
OTHER_PHASES = 3  # of a step: the embedding, and two of logits


@njit(**INLINE)
def _run(models, layers, works, tasks, merges, sync, thread):
    """The share of one thread in what the record asks for; returns when nothing is left to do."""
    model, work = models[0], works[0]
    own, row, threads = work.scratch + thread * model.scratch_bytes, work.board, work.threads
    few = work.tokens <= FEW_TOKENS
    if HAS_MATRIX_UNIT and work.tile_rows:
        matrix.configure(model.shapes + work.tile_rows * matrix.SHAPE_BYTES)
    if work.embeds:
        _embed(model, work, row, thread)
        row += work.row_bytes
    for index in range(work.first_layer, work.last_layer):
        layer = layers[index]
        if threads > 1:
            enter(sync, thread, threads, index, work.sets)
        if work.writes:
            if few:
                write_by_outputs(model, layer, work, index, row, thread, own)
            else:
                write_by_tokens(model, layer, work, index, row, thread, own)
        row += 2 * work.row_bytes
        if work.mixes:
            _attention(model, layer, work, index, tasks, merges, row, thread, own)
            if few:
                mix_by_outputs(model, layer, work, index, row + 2 * work.row_bytes, thread, own)
            else:
                mix_by_tokens(model, layer, work, index, row + 2 * work.row_bytes, thread, own)
        row += (PHASES - 2) * work.row_bytes
    if work.ends:
        _logits(model, work, row, thread, own)
    if HAS_MATRIX_UNIT and work.tile_rows:
        matrix.release()


@njit(**FLAGS)
def run(models, layers, works, tasks, merges, sync, thread):
    """Thread 0: do what ``works[0]`` asks for, together with the helpers. A helper: its life, until the crew is dismissed."""
    seen, threads = 0, works[0].threads
    if thread == 0 and threads > 1:
        begin(sync)
    while True:
        if thread > 0:
            seen = await_work(sync, seen)
            if seen < 0:
                return
        _run(models, layers, works, tasks, merges, sync, thread)
        if threads > 1:
            leave(sync, thread, threads)
        if thread == 0:
            return
