"""What a policy's choice will come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.core.ids import MemberId
from moonpool.core.placement import Placement, Source
from moonpool.scheduler.costs import Plan, least, step_at
from moonpool.scheduler.policy import Asked, Choice
from moonpool.scheduler.spans import Seat, Span, timed

DECODE_TIE = 0.01  # near its target a step has no five per cent to give away


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds. ``high`` includes the spread of the fit; only a ``sure`` one can miss a target."""

    likely: float
    high: float
    sure: bool

    def misses(self, target_ms: float | None) -> bool:
        return self.sure and target_ms is not None and self.high * 1e3 > target_ms


@dataclass(frozen=True, slots=True)
class Share:
    """What the worker at ``row`` computes of a prompt, and how many seconds that takes it, waiting for others included."""

    row: int
    span: Span
    busy_s: float


@dataclass(frozen=True, slots=True)
class Option:
    """Rows of the board, how the prompt comes together, and what is to be expected of it. Seconds and tokens.

    ``plan`` and ``wait_s`` are of the worker that begins; ``work_s`` is of all that compute the prompt together.
    """

    prefill: int
    decode: int
    plan: Plan
    wait_s: float
    transfer_s: float
    work_s: float
    cached_tokens: int  # not to be computed
    ttft: Prediction
    tbt: Prediction
    begin: int = 0  # tokens: the first that is computed, what is computed while others come in left out
    group: tuple[Share, ...] = ()  # who compute it together, in prompt order; empty: ``prefill`` alone

    @property
    def lead(self) -> int:
        """The row that begins, and takes in what the plan says."""
        return self.group[0].row if self.group else self.prefill


@dataclass(frozen=True, slots=True)
class Considered:
    """An option by the names of its workers, which outlast the board. ``until``: leading blocks not computed."""

    prefill: MemberId
    decode: MemberId
    until: int
    option: Option


def predict(asked: Asked, choice: Choice, wait_s: float | None = None) -> Option:
    """``wait_s``: how long the prompt waits until it is begun; None: as long as its worker is busy."""
    board, row, prompt, now = asked.board, choice.lead, asked.prompt, asked.now
    plan = Plan(int(asked.held.own[row]), asked.local_blocks(row), choice.until, choice.source, choice.front, choice.move)
    transfer = 0.0
    if plan.source is not None and plan.until > plan.local + plan.front:
        size = (plan.until - plan.local - plan.front) * board.block_bytes
        transfer = float(asked.links.seconds(plan.source, size, (board.workers[row].member.node,))[0])
    if choice.helpers:
        return _together(asked, choice, plan, transfer, wait_s or 0.0)
    end = min(plan.until * prompt.block_tokens, prompt.tokens - 1)  # the last token is always computed
    begin = min(plan.local * prompt.block_tokens, end)
    middle = min((plan.local + plan.front) * prompt.block_tokens, end)
    a, b, c, d = (float(x) for x in board.prefill_fit[:, row])
    front = b * (middle - begin) + c * (middle * middle - begin * begin)
    rest = b * (prompt.tokens - end) + c * (prompt.tokens * prompt.tokens - end * end)
    load = d * prompt.block_tokens * (plan.until - plan.own - plan.front)
    work = a + front + rest + load
    wait = board.wait(row, work, now) if wait_s is None else wait_s
    if plan.front:
        ended = max(wait + front, transfer) - front + work  # the part computed first hides in the transfer, or hides it
    else:
        ended = max(wait + work, transfer)  # layer by layer, each as soon as it is there
    ttft = ended + asked.overhead_s
    computed = prompt.tokens - end + middle - begin
    sure = computed <= float(board.prefill_reach[row])
    high = ttft + work * float(board.prefill_spread[row])
    return Option(
        row,
        choice.decode,
        plan,
        wait,
        transfer,
        work,
        prompt.tokens - computed,
        Prediction(ttft, high, sure),
        _tbt(asked, choice.decode, ttft),
        end,
    )


def _together(asked: Asked, choice: Choice, plan: Plan, transfer_s: float, wait_s: float) -> Option:
    """``wait_s``: nobody begins before that."""
    board, prompt = asked.board, asked.prompt
    rows = [*(row for row, _ in choice.helpers), choice.prefill]
    begin = min(plan.until * prompt.block_tokens, prompt.tokens - 1)
    bounds = (begin, *(blocks * prompt.block_tokens for _, blocks in choice.helpers), prompt.tokens)
    seats = seats_of(asked, plan, rows, wait_s)
    spans = timed(bounds, seats, max(board.layers, 1), transfer_s)
    ttft = spans[-1].ends_s + asked.overhead_s
    longest = max(span.ends_s - span.begins_s for span in spans)
    sure = all(span.end - span.begin <= board.prefill_reach[row] for row, span in zip(rows, spans, strict=True))
    shares = tuple(Share(row, span, span.ends_s - seat.free_s) for row, span, seat in zip(rows, spans, seats, strict=True))
    return Option(
        choice.prefill,
        choice.decode,
        plan,
        seats[0].free_s,
        transfer_s,
        sum(share.busy_s for share in shares),
        begin,
        Prediction(ttft, ttft + longest * float(board.prefill_spread[rows].max()), bool(sure)),
        _tbt(asked, choice.decode, ttft),
        begin,
        shares,
    )


def seats_of(asked: Asked, plan: Plan, rows: Sequence[int], wait_s: float) -> list[Seat]:
    """The workers at ``rows`` as a group whose first one has what ``plan`` says, none of them free before ``wait_s``."""
    board, prompt = asked.board, asked.prompt
    size = prompt.tokens * board.block_bytes / prompt.block_tokens
    hops = np.zeros(len(board.names))
    if size > 0:
        hops = asked.links.seconds(board.nodes[rows[0]], size, board.nodes)
    latency = asked.links.latency_s
    seats = []
    for at, row in enumerate(rows):
        a, b, c, d = (float(x) for x in board.prefill_fit[:, row])
        free = max(float(board.busy_until[row]) - asked.now, wait_s, 0.0)
        if not at:
            seats.append(Seat(free, a + d * prompt.block_tokens * (plan.until - plan.own), b, c))
            continue
        hop = max(float(hops[row]) - latency, 0.0) / prompt.tokens
        seats.append(Seat(free, a, b, c, d, hop, latency if hops[row] > 0.0 else 0.0))
    return seats


def _tbt(asked: Asked, row: int, after_s: float) -> Prediction:
    board = asked.board
    step, context = step_at(board.workers[row], row, board, asked.prompt, after_s)
    return Prediction(step, step * (1.0 + float(board.step_spread[row])), context <= float(board.step_reach[row]))


def decoder_for(asked: Asked, prefill: int) -> int | None:
    """The decode worker with the shortest step for a prompt computed at row ``prefill``; itself, where it has both roles."""
    if asked.board.both[prefill]:
        return prefill
    return least(asked.decode.tbt, asked.decodes, asked.board, tie=DECODE_TIE)


def choice_of(placed: Placement, asked: Asked) -> Choice | None:
    """The choice that led to ``placed``; None where one of its workers is not on the board."""
    known = asked.board.row
    row, partner = (known.get(ref.id) for ref in (placed.prefill, placed.decode))
    helpers = tuple((known[one.worker.id], one.until) for one in placed.helpers if one.worker.id in known)
    if row is None or partner is None or len(helpers) < len(placed.helpers):
        return None
    lead = helpers[0][0] if helpers else row
    node = asked.board.workers[lead].member.node
    taken = [part for part in placed.segments if part.source is not Source.RECOMPUTE]
    until = max((part.first + part.count for part in taken), default=0)
    far = next((part for part in taken if part.source is Source.FETCH and part.node not in (None, node)), None)
    front = 0 if far is None else far.first - min(asked.local_blocks(lead), far.first)
    move = far is not None and far.move
    return Choice(row, partner, until, None if far is None else far.node, front, move, helpers=helpers)
