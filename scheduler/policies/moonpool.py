"""Moonpool's own placement: prefill worker, decode worker and what to do about every part of the prompt, chosen together.

Requests wait in one queue, short ones first with ageing, and are bound when a prefill worker is about to be free (late
binding). For every worker, busy ones too, the first token is predicted with its own blocks, with a fetch from whoever has
more, the front computed meanwhile, and with what it is computing for somebody else just now. The soonest wins: where that is
a busy worker, the request waits on for it, and the free one takes the next in the queue. What was fetched is a move: the
source's copy is the first to be evicted, so that the cluster's memory is not filled with copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moonpool.core.ids import NodeId
from moonpool.scheduler.actions import Action, Prefetch, Replicate
from moonpool.scheduler.board import Floats
from moonpool.scheduler.choice import decoder_for
from moonpool.scheduler.colocate import Limits, colocated
from moonpool.scheduler.costs import TIE_S, least, work_seconds
from moonpool.scheduler.fetching import fetching
from moonpool.scheduler.grouping import Grouping, grouped
from moonpool.scheduler.policy import Asked, Choice, Waiting, lookahead

PRESSED = 0.8  # of its target: a step that would already take longer now
SOURCES = 2  # holders compared for one request; they take turns


@dataclass(frozen=True)
class Moonpool:
    name = "moonpool"
    late = True

    age: float = 0.1
    size_weight: float = 1.0  # 0: first come, first served
    wait_cap_s: float = 60.0
    lookahead_s: float = 0.0
    lookahead_both_s: float = 0.0  # of workers of role both: two prompts that come together are computed in one step
    patience: float = 0.02  # how much sooner, relatively, a busy worker must be than a free one
    move: float = 1.0  # 0: what is fetched is a copy
    colocate: float = 0.0  # prompt tokens, at most, that a decode worker computes itself where that is sooner; 0: none
    chunk: float = 512.0  # of them in one of its steps
    gap_s: float = 0.1  # between two ids that answers without a target bear meanwhile
    paced: float = 0.0  # 1: workers cut chunks so that it is kept
    decode_window_s: float = 15.0  # in which a decode worker's steps count, from the first token on; 0: its step of now
    room: float = 0.95  # of its target for gaps: a prompt whose steps would be longer is held back; 0: none is
    held: float = 0.5  # of its target for the first token, at most
    hot: float = 4.0  # so many prompts being computed that begin alike make what they share worth more copies
    group: float = 0.0  # workers, at most, that compute one long prompt together; 0 or 1: each prompt has one
    group_least_s: float = 1.0  # seconds that it takes one worker: shorter ones are not shared
    group_gain_s: float = 0.2  # how much sooner the first token must come for each worker more,
    group_share: float = 0.2  # and relatively
    group_soon: float = 0.25  # of what the prompt takes one worker: who is free within that may be asked to help
    group_settle_s: float = 0.05  # after its arrival, no group sooner: what comes with it in a burst goes first

    def choose(self, asked: Asked) -> Choice | None:
        choice = self._alone(asked)
        if choice is None or self.group < 2 or choice.prefill == choice.decode:
            return choice
        rules = Grouping(
            int(self.group), self.group_least_s, self.group_gain_s, self.group_share, self.group_soon, self.group_settle_s
        )
        return grouped(asked, choice, rules)

    def _alone(self, asked: Asked) -> Choice | None:
        alone = asked.local.wait + asked.local.work
        plan = fetching(asked, _holders(asked))
        ttft = alone.copy() if plan is None else np.minimum(alone, plan.ttft)
        _wait_for_others(asked, ttft)
        row = self._soonest(asked, ttft)
        decode = None if row is None else self._decoder(asked, row, float(ttft[row]))
        if row is None or decode is None:
            return None
        own = (
            colocated(asked, Limits(int(self.chunk), int(self.colocate), self.gap_s, self.paced > 0.0))
            if self.colocate
            else None
        )
        if own is not None and own.ttft_s - asked.overhead_s < ttft[row] - TIE_S:
            return own.choice
        hold = self._crowded(asked, decode)
        if plan is None or plan.ttft[row] > ttft[row] or plan.ttft[row] >= alone[row]:
            return Choice(row, decode, asked.local_blocks(row), hold=hold)
        source = plan.sources[plan.source[row]]
        moves = self.move > 0 and asked.sharing < self.hot
        return Choice(row, decode, asked.held.anywhere, source, int(plan.front[row]), moves, hold)

    def _soonest(self, asked: Asked, ttft: Floats) -> int | None:
        """Among equals: the longest match of its own, then the least booked, then the one chosen longest ago."""
        board = asked.board
        busy = asked.local.wait > lookahead(self, board)
        felt = np.where(asked.prefills, ttft * (1.0 + self.patience * busy), np.inf)
        soonest = felt.min(initial=np.inf)
        if soonest == np.inf:
            return None
        (tied,) = (felt <= soonest + TIE_S).nonzero()
        if len(tied) == 1:
            return int(tied[0])
        own = asked.local.covered[0]
        return int(tied[np.lexsort((tied, board.last_chosen[tied], board.load[tied], -own[tied], busy[tied]))[0]])

    def _decoder(self, asked: Asked, row: int, ttft: float) -> int | None:
        """The decode worker whose longest expected step, while the answer begins, is the shortest."""
        if self.decode_window_s <= 0.0 or asked.board.both[row]:
            return decoder_for(asked, row)
        ahead = asked.board.ahead(asked.now + ttft, self.decode_window_s, asked.prompt.tokens)
        found = least(ahead.step_s, asked.decodes, asked.board)
        target_ms = asked.request.targets.tbt_ms
        if found is None or target_ms is None or asked.decode.tbt[found] * 1e3 <= PRESSED * target_ms:
            return found
        return decoder_for(asked, row)  # whoever leaves, others are about to take the room

    def _crowded(self, asked: Asked, decode: int) -> bool:
        """Its steps would be too long with all that run there and are on their way: better to begin once some have left.

        For no longer than a part of the target for the first token, which waiting uses up.
        """
        board, targets = asked.board, asked.request.targets
        if not self.room or targets.tbt_ms is None or targets.ttft_ms is None or board.both[decode]:
            return False
        crowded = asked.decode.tbt[decode] * 1e3 > self.room * targets.tbt_ms and board.batch[decode] > 0
        return bool(crowded and board.step_reach[decode] > 0.0 and asked.waited_s * 1e3 < self.held * targets.ttft_ms)

    def key(self, waiting: Waiting) -> float:
        return self.size_weight * waiting.work_s + self.age * waiting.arrived

    def ahead(self, asked: Asked, choice: Choice) -> list[Action]:
        """What lies on the SSD of the node it will be taken from comes into its DRAM while the request waits."""
        return [*_from_ssd(asked, choice)]

    def follow_up(self, asked: Asked, choice: Choice) -> list[Action]:
        """One more copy of what is hot, each time that twice as many share it."""
        sharing, hot = asked.sharing, max(int(self.hot), 1)
        times = sharing // hot
        if sharing % hot or times & (times - 1) or not times or len(asked.held.holders) > times:
            return []
        return [*_spread(asked, choice)]


def _holders(asked: Asked) -> tuple[NodeId, ...]:
    holders, turn = asked.held.holders, asked.number
    if len(holders) <= SOURCES:
        return holders
    return tuple(holders[(turn + i) % len(holders)] for i in range(SOURCES))


def _from_ssd(asked: Asked, choice: Choice) -> Iterator[Prefetch]:
    node = choice.source or asked.board.nodes[choice.prefill]
    keys, pool = asked.request.keys[: choice.until], asked.pool
    if keys and pool is not None and pool.tier_of(keys[-1], node) not in (None, pool.top):
        yield Prefetch(node, keys)


def _spread(asked: Asked, choice: Choice) -> Iterator[Replicate]:
    """To the node that would have it soonest, of those that neither have it nor are getting it."""
    board, held = asked.board, asked.held
    taken = {*held.holders, board.nodes[choice.prefill]}
    rows = [row for row in asked.prefills.nonzero()[0] if board.nodes[row] not in taken and board.pooled[row]]
    if not rows or not held.holders:
        return
    source = held.holders[asked.number % len(held.holders)]
    seconds = asked.links.seconds(source, held.anywhere * board.block_bytes, tuple(board.nodes[row] for row in rows))
    yield Replicate(source, board.nodes[rows[int(seconds.argmin())]], asked.request.keys[: held.anywhere])


def _wait_for_others(asked: Asked, ttft: Floats) -> None:
    """Lower ``ttft`` where a worker will be done sooner with what it computes for another request than without."""
    for soon in asked.soon:
        covered = np.full(len(ttft), soon.blocks)
        work = float(work_seconds(asked.board, asked.prompt, covered, asked.held.own)[soon.row])
        begun = max(soon.ready_at - asked.now, float(asked.local.wait[soon.row]))
        ttft[soon.row] = min(ttft[soon.row], begun + work)
