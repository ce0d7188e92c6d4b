"""Which workers may take a request at all, and the refusal that names what is missing."""

from __future__ import annotations

import numpy as np

from moonpool.core.errors import Reason
from moonpool.core.ids import MemberId, NodeId
from moonpool.core.membership import Member
from moonpool.core.placement import PlaceRequest, Refusal
from moonpool.scheduler.board import Board, Bools, Usable

RETRY_S = 1.0  # a restarted worker is back within seconds


def usable(board: Board, stores: dict[NodeId, Member], request: PlaceRequest) -> Usable | Refusal:
    """Live, ready, large enough, not excluded. A split needs a live store node beside its decode worker: KV lands there."""
    if board.everybody is not None and not request.exclude and request.prompt_tokens <= board.smallest:
        return board.everybody
    allowed = board.max_prompt >= request.prompt_tokens
    pooled, barred = board.pooled, frozenset[NodeId]()
    if request.exclude:
        allowed[[board.row[name] for name in request.exclude if name in board.row]] = False
        barred = frozenset(node for node, store in stores.items() if store.id in request.exclude)
        pooled = pooled & np.array([worker.member.node not in barred for worker in board.workers], bool)
    split, decodes = board.split & allowed, board.decode_only & allowed & pooled
    found = Usable.of(split, decodes, board.both & allowed, pooled, barred)
    return found if found is not None else _no_path(board, request, split, decodes, pooled)


def _no_path(board: Board, request: PlaceRequest, split: Bools, decodes: Bools, pooled: Bools) -> Refusal:
    lacking = []
    if not split.any():
        lacking.append(_why("prefill", board, board.split | board.both, request))
    if not decodes.any():
        text = _why("decode", board, board.decode_only | board.both, request)
        stranded = int((board.decode_only & ~pooled).sum())
        if stranded:
            text += f", {stranded} without a live store node"
        lacking.append(text)
    return Refusal(Reason.NO_PATH, "; ".join(lacking), RETRY_S)


def _why(role: str, board: Board, rows: Bools, request: PlaceRequest) -> str:
    excluded = {MemberId(name) for name in request.exclude}
    names = [worker.member.id for worker, counts in zip(board.workers, rows, strict=True) if counts]
    small = int((rows & (board.max_prompt < request.prompt_tokens)).sum())
    text = f"no {role} worker can take the request: {len(names)} live and ready"
    if failed := len(excluded.intersection(names)):
        text += f", {failed} excluded after failing it"
    if small:
        largest = int(board.max_prompt[rows].max())
        text += f", {small} too small for {request.prompt_tokens} prompt tokens (the largest holds {largest})"
    return text
