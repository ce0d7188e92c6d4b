"""Several prefill workers on one long prompt: who helps, and where the prompt is cut between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moonpool.core.placement import MOST_IN_GROUP
from moonpool.scheduler.board import Floats
from moonpool.scheduler.choice import Option, predict, seats_of
from moonpool.scheduler.costs import TIE_S
from moonpool.scheduler.policy import Asked, Choice
from moonpool.scheduler.spans import cut


@dataclass(frozen=True, slots=True)
class Grouping:
    """Up to ``most`` workers on a prompt that takes one of them ``least_s``. Each must bring the first token ``gain_s`` nearer,
    and by ``share`` of the time left, and by what its own start-up costs those who wait. Who is free within ``soon`` of what
    the prompt takes one worker may help. Nothing is decided in the first ``settle_s`` after a prompt came, even where nobody
    could help as yet: what comes with it, in a burst, may be shorter and needs workers of its own."""

    most: int
    least_s: float
    gain_s: float
    share: float
    soon: float
    settle_s: float


def grouped(asked: Asked, choice: Choice, rules: Grouping) -> Choice:
    """``choice`` with those who help its worker, as far as that pays. Its worker begins, since it has what is cached; the last
    one to be free ends."""
    board, most = asked.board, min(rules.most, MOST_IN_GROUP)
    if most < 2 or choice.hold or choice.front or not board.split[choice.prefill] or board.layers < 2:
        return choice
    alone = predict(asked, choice)
    if alone.work_s < rules.least_s or alone.wait_s > TIE_S:
        return choice
    if asked.waited_s < rules.settle_s - TIE_S:
        return replace(choice, hold=True, settle_s=rules.settle_s - asked.waited_s)
    found, best, delayed = choice, alone, max(asked.waiting - 1, 0)
    helpers = _helpers(asked, choice, rules.soon * alone.work_s)[: most - 1]
    for count in range(1, len(helpers) + 1):
        tried = _with(asked, choice, alone, helpers[:count])
        if tried is None:
            break
        option = predict(asked, tried)
        least = max(rules.gain_s, rules.share * best.ttft.likely) + delayed * (option.work_s - best.work_s)
        if best.ttft.likely - option.ttft.likely < least:
            break
        found, best = tried, option
    return found


def _helpers(asked: Asked, choice: Choice, within_s: float) -> list[int]:
    """Who could help, soonest free first, but for one each for those who go before this prompt and wait on. Of those who take
    turns with the cores of a host only one is of use."""
    board = asked.board
    free: Floats = np.maximum(board.busy_until - asked.now, 0.0)
    (rows,) = (asked.prefills & board.split & (free <= within_s + TIE_S)).nonzero()
    order = np.lexsort((board.last_chosen[rows], free[rows]))
    able: list[int] = []
    cores = {board.turns[choice.prefill]}
    for row in rows[order].tolist():
        mine = board.turns[row]
        if row != choice.prefill and (not mine or mine not in cores):
            cores.add(mine)
            able.append(row)
    return able[asked.others :]


def _with(asked: Asked, choice: Choice, alone: Option, helpers: Sequence[int]) -> Choice | None:
    """``choice`` with the prompt cut between its worker and ``helpers``; None where there is too little to share."""
    prompt, rows = asked.prompt, (choice.prefill, *helpers)
    bounds = cut(alone.begin, prompt.tokens, prompt.block_tokens, seats_of(asked, alone.plan, rows, 0.0), asked.board.layers)
    if bounds is None:
        return None
    ends = [bound // prompt.block_tokens for bound in bounds[1:-1]]
    return Choice(
        rows[-1],
        choice.decode,
        choice.until,
        choice.source,
        move=choice.move,
        helpers=tuple(zip(rows[:-1], ends, strict=True)),
    )
