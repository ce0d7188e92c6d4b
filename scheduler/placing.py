"""From an option to what is booked, told and expected on the links because of it."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.core.ids import NodeId
from moonpool.core.placement import MOST_IN_GROUP, Helper, Placement
from moonpool.scheduler.bookings import Booking, Part
from moonpool.scheduler.choice import Option
from moonpool.scheduler.costs import segments
from moonpool.scheduler.policy import Asked


def booking_of(asked: Asked, option: Option, number: int, kind: int) -> Booking:
    """``kind``: class of its answer's length."""
    board, request, now = asked.board, asked.request, asked.now
    seconds = max(option.work_s, option.ttft.likely - option.wait_s - asked.overhead_s)
    cached, asked_at = option.cached_tokens, 0.0
    if option.group:
        last = option.group[-1]
        seconds, cached, asked_at = last.busy_s, last.span.begin, now + last.span.begins_s
    return Booking(
        number,
        request.request,
        request.attempt,
        board.workers[option.prefill].ref.id,
        board.workers[option.decode].ref.id,
        seconds,
        request.prompt_tokens,
        cached,
        now,
        now + option.ttft.likely,
        request.keys,
        kind,
        request.max_tokens,
        max(request.choices, 1),
        asked_at=asked_at,
        parts=tuple(
            Part(board.names[share.row], share.busy_s, share.span.begin, share.span.end) for share in option.group[:-1]
        ),
    )


def placement_of(asked: Asked, option: Option, number: int) -> Placement:
    workers, size = asked.board.workers, asked.prompt.block_tokens
    return Placement(
        workers[option.prefill].ref,
        workers[option.decode].ref,
        segments(asked.prompt, option.plan, workers[option.lead].ref.node),
        option.ttft.likely * 1e3 if option.ttft.sure else 0.0,
        option.tbt.likely * 1e3 if option.tbt.sure else 0.0,
        number,
        tuple(Helper(workers[share.row].ref, share.span.end // size) for share in option.group[:-1]),
    )


def flows_of(asked: Asked, option: Option) -> Iterator[tuple[str, NodeId, NodeId, float, float]]:
    """(name, source, target, bytes, when it begins) of the fetch, of what helpers hand on, and of the hand-off."""
    board, request, now, plan = asked.board, asked.request.request, asked.now, option.plan
    if plan.source is not None and option.transfer_s > 0.0:
        fetched = (plan.until - plan.local - plan.front) * board.block_bytes
        yield request, plan.source, board.nodes[option.lead], fetched, now
    token_bytes = board.block_bytes / asked.prompt.block_tokens
    for at, (one, other) in enumerate(zip(option.group, option.group[1:], strict=False), 1):
        before = other.span.begin * token_bytes
        yield _hop(request, at), board.nodes[one.row], board.nodes[other.row], before, now + one.span.begins_s
    if option.prefill != option.decode:
        size, begun = asked.handed_bytes(option.decode), now + option.wait_s
        yield _handed_over(request), board.nodes[option.prefill], board.nodes[option.decode], size, begun


def flow_names(request: str) -> Iterator[str]:
    """All that ``flows_of`` may have begun for ``request``."""
    yield request
    yield _handed_over(request)
    for at in range(1, MOST_IN_GROUP):
        yield _hop(request, at)


def _handed_over(request: str) -> str:
    """The name of the flow from its prefill to its decode worker; its fetch goes by its own."""
    return f"{request} handed over"


def _hop(request: str, at: int) -> str:
    return f"{request} hop {at}"
