"""What a prompt costs on every worker: seconds of prefill and of a decode step, over the rows of a read-only board.

A prefill worker reuses what lies in its own pages and loads what its node's pool holds further, always. Whether it also
fetches what the deepest holder anywhere holds beyond that, or computes it, is decided by price.
TTFT = wait + load and compute + what lies between the worker's first token and the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.core.ids import NodeId
from moonpool.core.placement import Segment, Source
from moonpool.scheduler.board import Board, Bools, Floats, Ints, Worker

TIE = 0.05  # predictions this close are equal: the less booked worker takes it, then the one chosen longest ago
TIE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` in all, of which ``blocks`` whole blocks of ``block_tokens`` have keys."""

    tokens: int
    blocks: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """Leading blocks of one prompt, per row: in the worker's own pages, in its node's pool, and (one number) anywhere.

    ``holders``: the nodes whose pools hold that many, by name.
    """

    own: Ints
    node: Ints
    anywhere: int
    holders: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class Soon:
    """The worker at ``row`` is computing a prompt with the same leading ``blocks``; it will have them at ``ready_at``."""

    row: int
    blocks: int
    ready_at: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Leading blocks of one prompt at one prefill worker: ``own`` reused, up to ``local`` loaded from its node's pool, up to
    ``until`` fetched from ``source``, of which the first ``front`` are computed while the others come in."""

    own: int
    local: int
    until: int
    source: NodeId | None = None
    front: int = 0
    move: bool = False


@dataclass(frozen=True, slots=True)
class PrefillScores:
    """Seconds per row."""

    table: Floats  # [6, rows]: ttft, high, wait, work, cached, sure; the fields below are views of it
    ttft: Floats
    high: Floats  # ttft with the spread of its estimate
    wait: Floats
    work: Floats
    cached: Floats  # tokens
    sure: Floats  # 1 where the fit covers the job
    covered: Ints  # [2, rows] blocks not to be computed: without a fetch, with it
    fetches: Ints  # 1 where the fetch pays


@dataclass(frozen=True, slots=True)
class DecodeScores:
    """Per row: the step time in seconds with the new sequence in it, nobody having left."""

    tbt: Floats
    roomy: Bools  # the prompt fits into free pages now


def depths(runs: list[tuple[int, int]], bits: int) -> Ints:
    """[bits + 1] matched blocks by bit number; the last entry, 0, serves rows without a bit (-1)."""
    out = np.zeros(bits + 1, np.int64)
    for depth, mask in runs:
        if mask & (mask - 1) == 0:
            out[mask.bit_length() - 1] = depth
            continue
        raw = np.frombuffer(mask.to_bytes((bits + 7) // 8, "little"), np.uint8)
        out[:-1][np.unpackbits(raw, count=bits, bitorder="little").view(bool)] = depth
    return out


def shared_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Leading keys that are equal. Keys are chained: once two differ, all that follow do."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) >> 1
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def score_prefill(
    board: Board, pooled: Bools, prompt: Prompt, held: Held, overhead_s: float, now: float, *, fetch: bool = True
) -> PrefillScores:
    """``pooled`` rows have a store node to load from and, with ``fetch``, to fetch into."""
    covered = np.empty((2, len(pooled)), np.int64)
    covered[:] = held.own
    np.maximum(held.own, held.node, out=covered[0], where=pooled)
    covered[1] = covered[0]
    if fetch:
        np.maximum(covered[0], held.anywhere, out=covered[1], where=pooled)
    cached = np.minimum(covered * prompt.block_tokens, prompt.tokens - 1)
    cost = work_seconds(board, prompt, covered, held.own)
    fetches = cost.argmin(axis=0)  # of equal prices the one that moves less
    rows = board.numbers
    table = np.empty((6, len(rows)))
    ttft, high, wait, work, kept, sure = table
    work[:], kept[:] = cost[fetches, rows], cached[fetches, rows]
    wait[:] = board.waits(work, now)
    np.add(wait, work + overhead_s, out=ttft)
    np.add(ttft, work * board.prefill_spread, out=high)
    np.less_equal(prompt.tokens - kept, board.prefill_reach, out=sure)
    return PrefillScores(table, ttft, high, wait, work, kept, sure, covered, fetches)


def score_decode(board: Board, prompt: Prompt) -> DecodeScores:
    a, b, c = board.step_fit
    tbt = a + b * (board.batch + 1) + c * (board.context + prompt.tokens)
    return DecodeScores(tbt, board.room >= prompt.tokens)


def work_seconds(board: Board, prompt: Prompt, covered: Ints, own: Ints) -> Floats:
    """Per row: seconds of prefill with ``covered`` leading blocks not computed, those beyond ``own`` loaded. The last prompt
    token is always computed."""
    cached = np.minimum(covered * prompt.block_tokens, prompt.tokens - 1)
    a, b, c, d = board.prefill_fit
    cost: Floats = a + (prompt.tokens - cached) * (b + c * (prompt.tokens + cached))  # n^2 - p^2 = (n - p)(n + p)
    cost += d * prompt.block_tokens * (covered - own)
    return cost


def least(value: Floats, rows: Bools, board: Board, *, tie: float = TIE) -> int | None:
    """The row of the smallest value; among equals the least booked one, then the one chosen longest ago.

    Values within ``tie`` of each other, relatively, are equal; so are, unless that is 0, those within a millisecond.
    """
    masked = np.where(rows, value, np.inf)
    best = masked.min() if len(masked) else np.inf
    if best == np.inf:
        return None
    (tied,) = (masked <= best * (1.0 + tie) + (TIE_S if tie else 0.0)).nonzero()
    if len(tied) == 1:
        return int(tied[0])
    return int(tied[np.lexsort((tied, board.last_chosen[tied], board.load[tied]))[0]])


def step_at(worker: Worker, row: int, board: Board, prompt: Prompt, after_s: float) -> tuple[float, int]:
    """Step time of ``worker`` once this prompt joins ``after_s`` from now, and the context tokens it then reads.

    Sequences that reach their last possible token before that have left; the others have grown.
    """
    a, b, c = (float(x) for x in board.step_fit[:, row])
    batch, context = int(board.batch[row]), int(board.context[row])
    step = max(a + b * batch + c * context, 1e-6)
    steps = int(after_s / step)
    left = [attempt for attempt in worker.attempts if attempt.remaining_tokens <= steps]
    batch -= len(left)
    context += batch * steps - sum(attempt.prompt_tokens for attempt in left)
    context += prompt.tokens
    return a + b * (batch + 1) + c * context, context


def segments(prompt: Prompt, plan: Plan, node: NodeId) -> tuple[Segment, ...]:
    """Blocks ``[0, own)`` from device pages, ``[own, local)`` from ``node``, then ``front`` computed while those up to
    ``until`` come from ``plan.source``, then the rest computed."""
    parts = (
        (plan.own, Source.REUSE, None),
        (plan.local, Source.FETCH, node),
        (plan.local + plan.front, Source.RECOMPUTE, None),
        (plan.until, Source.FETCH, plan.source),
        (prompt.blocks, Source.RECOMPUTE, None),
    )
    out: list[Segment] = []
    first = 0
    for end, kind, where in parts:
        if end > first:
            out.append(Segment(first, end - first, kind, where, plan.move and where == plan.source and where != node))
            first = end
    return tuple(out)
