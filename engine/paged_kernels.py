"""Attention of single tokens over K/V where it lies in pages: kernels that numba compiles for whatever CPU it runs on.

The keys that a token sees are cut at multiples of ``SPLIT`` positions. A *task* is one such part for one K/V head of one row
and for all query heads that share it: each key and value is read once, and few rows with long contexts still give every
thread something to do. A part's softmax is relative to its own maximum; whoever finishes the last part of a (row, K/V head)
merges them by their log-sum-exp (Flash-Decoding, Dao et al., 2023). Threads draw tasks from a counter; cuts and the order of
merging depend on positions alone. So a result has the same bits with any number of threads and whatever else is in the batch.

Only a row's own tokens are ever read. NaN or an infinity among them reaches the row's result: the flags below let the
compiler sum in lanes and fuse multiplications with additions, nothing else.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, types

from moonpool.engine import kernel_cache  # noqa: F401  # before a kernel is decorated
from moonpool.engine.paged_numbers import (
    LOG2E,
    compiled,
    exp2,
    fetch_add,
    narrow,
    pointer,
    prefetch,
    sums_in_lanes,
    tanh,
    widen,
)

SPLIT = 256  # keys of a task
LINE = 64  # bytes that come from memory together
AHEAD = 16  # tokens
LANES = 16  # of the widest vectors there are; narrower ones take several for it

# One (row, K/V head).
UNIT = np.dtype(
    [
        ("token", np.int64),  # of the batch: where its queries and its result are
        ("head", np.int64),  # K/V head
        ("table", np.int64),  # address of its page numbers, int64
        ("low", np.int64),  # keys [low, end) are seen
        ("end", np.int64),
        ("parts", np.int64),
        ("first_task", np.int64),
        ("left", np.int64),  # parts not finished yet; back at ``parts`` when a call ends
    ]
)
_UNIT_BYTES, _LEFT_AT = UNIT.itemsize, UNIT.names.index("left") * 8  # type: ignore[union-attr]
TASK = np.dtype([("unit", np.int64), ("part", np.int64)])
# One layer of one step. Addresses are of arrays that outlive the call.
JOB = np.dtype(
    [
        ("keys", np.int64),  # address of the layer's K of the first head in page 0
        ("values", np.int64),  # planes (tokens of one head) from K to V of a head
        ("page_stride", np.int64),  # elements from a page to the next
        ("kv_heads", np.int64),
        ("share", np.int64),  # query heads for each K/V head
        ("dim", np.int64),  # of a head
        ("item", np.int64),  # bytes of a stored number
        ("block_tokens", np.int64),
        ("query", np.int64),  # address; dtype of the pages, dim contiguous
        ("query_head", np.int64),  # elements from a head to the next
        ("query_token", np.int64),
        ("out", np.int64),  # address of [tokens, heads, dim], dtype of the pages
        ("units", np.int64),  # address of UNIT [unit_count]
        ("unit_count", np.int64),
        ("tasks", np.int64),  # address of TASK [task_count]
        ("task_count", np.int64),
        ("taken", np.int64),  # address of an int64: how many tasks were drawn; 0 before the call
        ("partials", np.int64),  # address of float32 [task_count, share, 2 + dim]: maximum, sum of weights, weighted values
        ("scaling", np.float64),
        ("softcap", np.float64),  # 0: none
    ]
)


@compiled
def _cap(scores: Any, count: int, softcap: Any) -> None:
    """Scores [share, SPLIT] come as multiples of ``softcap``, and leave as those of ln 2."""
    for head in range(scores.shape[0]):
        for at in range(count):
            scores[head, at] = tanh(scores[head, at]) * (softcap * LOG2E)


@compiled
def _highest(scores: Any, count: int, lanes: Any) -> Any:
    """By lanes, in so many words: a compiler that heeds NaN does not turn a maximum into vectors."""
    for lane in range(LANES):
        lanes[lane] = scores[0]
    whole = count - count % LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            score = scores[first + lane]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    highest = scores[0]
    for lane in range(LANES):
        highest = lanes[lane] if lanes[lane] > highest else highest
    for at in range(whole, count):
        highest = scores[at] if scores[at] > highest else highest
    return highest


@compiled
def _weigh(scores: Any, count: int, highest: Any) -> None:
    for at in range(count):
        scores[at] = exp2(scores[at] - highest)


@sums_in_lanes
def _sum(weights: Any, count: int) -> Any:
    total = np.float32(0)
    for at in range(count):
        total += weights[at]
    return total


@compiled
def _merge(parts: Any, sums: Any) -> None:
    """``parts`` [n, share, 2 + dim] into ``sums`` [share, 2 + dim]."""
    for head in range(sums.shape[0]):
        highest = parts[0, head, 0]
        for part in range(parts.shape[0]):
            highest = parts[part, head, 0] if parts[part, head, 0] > highest else highest
        sums[head, :] = 0
        for part in range(parts.shape[0]):
            weight = exp2(parts[part, head, 0] - highest)
            for at in range(1, sums.shape[1]):
                sums[head, at] += weight * parts[part, head, at]


@sums_in_lanes
def _score(query: Any, keys: Any, scores: Any, first: int, values: int) -> None:
    """``scores[h, first + t]`` = query[h] . keys[t] of float32 [share, dim] and stored [tokens, dim].

    Head by head, four tokens at a time, so that the last steps of their sums overlap; keys stay in the nearest cache meanwhile.
    Keys to come, and the values at address ``values``, are asked for early: runs are too short for a CPU to guess them.
    """
    fours = keys.shape[0] - keys.shape[0] % 4
    row = keys.shape[1] * keys.itemsize
    for head in range(query.shape[0]):
        for t in range(0, fours, 4):
            a = b = c = d = np.float32(0)
            for i in range(query.shape[1]):
                q = query[head, i]
                a += q * widen(keys[t, i])
                b += q * widen(keys[t + 1, i])
                c += q * widen(keys[t + 2, i])
                d += q * widen(keys[t + 3, i])
            scores[head, first + t] = a
            scores[head, first + t + 1] = b
            scores[head, first + t + 2] = c
            scores[head, first + t + 3] = d
            if head == 0:
                for line in range(t * row, (t + 4) * row, LINE):
                    prefetch(keys.ctypes.data + AHEAD * row + line)
                    prefetch(values + line)
        for t in range(fours, keys.shape[0]):
            a = np.float32(0)
            for i in range(query.shape[1]):
                a += query[head, i] * widen(keys[t, i])
            scores[head, first + t] = a


@sums_in_lanes
def _add(weights: Any, first: int, values: Any, sums: Any) -> None:
    """Adds the sum over t of weights[h, first + t] * values[t] to ``sums[h, 2:]``; four tokens for each time it is stored."""
    fours = values.shape[0] - values.shape[0] % 4
    for head in range(sums.shape[0]):
        for t in range(0, fours, 4):
            a = weights[head, first + t]
            b = weights[head, first + t + 1]
            c = weights[head, first + t + 2]
            d = weights[head, first + t + 3]
            for i in range(values.shape[1]):
                sums[head, 2 + i] += (a * widen(values[t, i]) + b * widen(values[t + 1, i])) + (
                    c * widen(values[t + 2, i]) + d * widen(values[t + 3, i])
                )
        for t in range(fours, values.shape[0]):
            for i in range(values.shape[1]):
                sums[head, 2 + i] += weights[head, first + t] * widen(values[t, i])


@compiled
def _address(job: Any, page: Any, plane: Any, first: Any) -> Any:
    """Of token ``first`` of one page; ``plane`` counts K, then V, head by head."""
    return job.keys + (page * job.page_stride + (plane * job.block_tokens + first) * job.dim) * job.item


@compiled
def _attend(job: Any, kind: Any, unit: Any, low: Any, end: Any, query: Any, scores: Any, lanes: Any, sums: Any) -> None:
    """Keys [low, end) of ``unit``: maxima, sums of weights and weighted values into ``sums`` [share, 2 + dim]."""
    size = job.block_tokens
    table = carray(pointer(unit.table), ((end - 1) // size + 1,), np.int64)
    for block in range(low // size, (end - 1) // size + 1):
        a, b = max(low, block * size), min(end, (block + 1) * size)
        keys = carray(pointer(_address(job, table[block], unit.head, a - block * size)), (b - a, job.dim), kind)
        _score(query, keys, scores, a - low, _address(job, table[block], job.values + unit.head, a - block * size))
    if job.softcap != 0:
        _cap(scores, end - low, np.float32(job.softcap))
    for head in range(job.share):
        sums[head, :] = 0
        sums[head, 0] = _highest(scores[head], end - low, lanes)
        _weigh(scores[head], end - low, sums[head, 0])
        sums[head, 1] = _sum(scores[head], end - low)
    for block in range(low // size, (end - 1) // size + 1):
        a, b = max(low, block * size), min(end, (block + 1) * size)
        values = _address(job, table[block], job.values + unit.head, a - block * size)
        _add(scores, a - low, carray(pointer(values), (b - a, job.dim), kind), sums)


@compiled
def _read_query(job: Any, kind: Any, unit: Any, query: Any) -> None:
    """Scaled so that scores come in the units that the next step wants."""
    scaling = np.float32(job.scaling / job.softcap if job.softcap != 0 else job.scaling * LOG2E)
    for head in range(job.share):
        at = (unit.head * job.share + head) * job.query_head + unit.token * job.query_token
        given = carray(pointer(job.query + at * job.item), (job.dim,), kind)
        for i in range(job.dim):
            query[head, i] = widen(given[i]) * scaling


@compiled
def _write(job: Any, kind: Any, unit: Any, sums: Any) -> None:
    at = (unit.token * job.kv_heads + unit.head) * job.share * job.dim
    out = carray(pointer(job.out + at * job.item), (job.share, job.dim), kind)
    for head in range(job.share):
        for i in range(job.dim):
            out[head, i] = narrow(sums[head, 2 + i] / sums[head, 1], kind)


@compiled
def _work(job: Any, kind: Any) -> None:
    units = carray(pointer(job.units), (job.unit_count,), UNIT)
    tasks = carray(pointer(job.tasks), (job.task_count,), TASK)
    partials = carray(pointer(job.partials), (job.task_count, job.share, 2 + job.dim), np.float32)
    query = np.empty((job.share, job.dim), np.float32)
    scores = np.empty((job.share, SPLIT), np.float32)
    lanes = np.empty(LANES, np.float32)
    sums = np.empty((job.share, 2 + job.dim), np.float32)
    at = fetch_add(job.taken, 1)
    while at < job.task_count:
        number, part = tasks[at].unit, tasks[at].part
        unit = units[number]
        low = max(unit.low, (unit.low // SPLIT + part) * SPLIT)
        end = min(unit.end, (unit.low // SPLIT + part + 1) * SPLIT)
        _read_query(job, kind, unit, query)
        if unit.parts == 1:
            _attend(job, kind, unit, low, end, query, scores, lanes, sums)
            _write(job, kind, unit, sums)
        else:
            _attend(job, kind, unit, low, end, query, scores, lanes, partials[at])
            if fetch_add(job.units + number * _UNIT_BYTES + _LEFT_AT, -1) == 1:
                _merge(partials[unit.first_task : unit.first_task + unit.parts], sums)
                _write(job, kind, unit, sums)
                unit.left = unit.parts
        at = fetch_add(job.taken, 1)


def _bfloat16_work(job: Any) -> None:
    _work(carray(job, 1)[0], np.uint16)


def _float32_work(job: Any) -> None:
    _work(carray(job, 1)[0], np.float32)


@cache
def compiled_attention(dtype: str) -> Any:
    """A C function of the address of a JOB, for as many threads at once as one likes: each takes tasks until none is left.

    Compiles, which takes seconds, or loads what an earlier process compiled.
    """
    signature = types.void(types.CPointer(from_dtype(JOB)))
    work = {"bfloat16": _bfloat16_work, "float32": _float32_work}[dtype]
    return cfunc(signature, cache=True, error_model="numpy")(work)
