"""What a placement policy is given, and what it answers.

A policy is one small file in ``policies/``: a function over read-only views. It chooses workers and how much of a prompt
to take from where. What its choice will cost, whether that is admitted, and booking it are not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moonpool.core.ids import NodeId
from moonpool.core.placement import PlaceRequest
from moonpool.scheduler.actions import Action
from moonpool.scheduler.board import Board, Bools, Floats, Usable
from moonpool.scheduler.costs import DecodeScores, Held, PrefillScores, Prompt, Soon, score_decode, score_prefill
from moonpool.scheduler.links import Links
from moonpool.scheduler.prefix_index import PrefixIndex

SPARE = 0.2  # of a target, kept for what predictions are off by
OVERTAKEN = 0.5  # of a target: whose predicted time to first token is beyond that is not passed over for a shorter prompt


@dataclass(slots=True)
class Asked:
    """One request and what is known when it is decided. Read-only; scores are made when first asked for."""

    request: PlaceRequest
    prompt: Prompt
    usable: Usable
    board: Board
    held: Held
    links: Links
    now: float
    number: int  # decisions so far: turns of a round robin, counter of seeded draws
    overhead_s: float = 0.0  # between a prefill worker's first token and the gateway
    soon: tuple[Soon, ...] = ()  # what is being computed for others and reaches beyond all that is held
    sharing: int = 0  # prompts being computed that begin with all that is held of this one
    pool: PrefixIndex | None = field(default=None, repr=False)  # what nodes hold, by tier; to be read only
    waiting: int = 0  # requests let in and not bound to workers yet, which no row of the board counts
    waiting_tokens: int = 0  # of their prompts
    delayed: tuple[tuple[Waiting, float], ...] = ()  # who waits and would be delayed by this one: TTFT in seconds then
    waited_s: float = 0.0  # since its arrival
    others: int = 0  # requests that wait for a prefill worker and go before this one

    _local: PrefillScores | None = field(default=None, repr=False)
    _pooled: PrefillScores | None = field(default=None, repr=False)
    _decode: DecodeScores | None = field(default=None, repr=False)

    @property
    def pressed(self) -> float:
        """Among those delayed the worst predicted time to first token over its target; 0: nobody is delayed."""
        return pressed(self.delayed)

    @property
    def local(self) -> PrefillScores:
        """With what every worker has in its own pages and in its node's pool."""
        if self._local is None:
            self._local = self._score(fetch=False)
        return self._local

    @property
    def pooled(self) -> PrefillScores:
        """With a fetch from the deepest holder, where that pays."""
        if self._pooled is None:
            self._pooled = self._score(fetch=True)
        return self._pooled

    @property
    def decode(self) -> DecodeScores:
        if self._decode is None:
            self._decode = score_decode(self.board, self.prompt)
        return self._decode

    @property
    def scores(self) -> PrefillScores:
        """Those a policy has looked at."""
        return self._pooled or self._local or self.pooled

    def handed_bytes(self, row: int) -> int:
        """KV that decode worker ``row`` lacks and a prefill worker will push to its node."""
        return max(self.prompt.blocks - int(self.held.node[row]), 0) * self.board.block_bytes

    @property
    def prefills(self) -> Bools:
        """Usable rows; workers of role both that have no room for the prompt only where nobody else is left."""
        roomy = self.usable.prefills & (~self.board.both | (self.board.room >= self.prompt.tokens))
        return roomy if roomy.any() else self.usable.prefills

    @property
    def decodes(self) -> Bools:
        """Usable rows of decode workers; those that have no room for the prompt only where nobody else is left."""
        roomy = self.usable.decodes & (self.board.room >= self.prompt.tokens)
        return roomy if roomy.any() else self.usable.decodes

    def _score(self, *, fetch: bool) -> PrefillScores:
        return score_prefill(self.board, self.usable.pooled, self.prompt, self.held, self.overhead_s, self.now, fetch=fetch)

    def local_blocks(self, row: int) -> int:
        """Leading blocks that ``row`` has in its own pages or in its node's pool."""
        own = int(self.held.own[row])
        return max(own, int(self.held.node[row])) if self.usable.pooled[row] else own


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows of the board, and how the prompt comes together at ``prefill``.

    ``until`` leading blocks are not computed; those the worker and its node lack come from ``source``, except ``front`` of
    them, which are computed while the others come in. ``prefill == decode``: the decode worker computes the prompt itself.
    """

    prefill: int
    decode: int
    until: int
    source: NodeId | None = None
    front: int = 0
    move: bool = False  # the source's copy is the first to be evicted once it has arrived
    hold: bool = False  # a late policy had better wait: nobody can decode it inside its target yet, or
    settle_s: float = 0.0  # more may be about to come, which is known after so many seconds
    helpers: tuple[tuple[int, int], ...] = ()  # (row, blocks before the end of its span): who compute what lies before the span
    # of ``prefill``, in prompt order; ``until``, ``source`` and ``move`` are then of the first of them

    @property
    def lead(self) -> int:
        """The row that begins: the first helper, or ``prefill`` alone."""
        return self.helpers[0][0] if self.helpers else self.prefill


@dataclass(slots=True)
class Waiting:
    """A request in the conductor's queue. ``work_s``: predicted seconds of prefill where it would run best."""

    request: PlaceRequest
    arrived: float
    order: int
    work_s: float
    alone_s: float = 0.0  # predicted from its begin to its first token at the gateway
    target_s: float | None = None  # for the first token, from its arrival

    @property
    def latest(self) -> float:
        """When it must be begun at the latest to meet its target, with ``SPARE`` of it in hand."""
        if self.target_s is None:
            return float("inf")
        return self.arrived + (1.0 - SPARE) * self.target_s - self.alone_s


def pressed(delayed: Sequence[tuple[Waiting, float]]) -> float:
    """Of those delayed, with their predicted times to first token, the worst time over its target; 0 without any."""
    return max((ttft_s / one.target_s for one, ttft_s in delayed if one.target_s), default=0.0)


def lookahead(policy: Policy, board: Board) -> Floats:
    """How long before each worker is free it may be given a request that waits."""
    return np.where(board.both, max(policy.lookahead_s, policy.lookahead_both_s), policy.lookahead_s)


def bound_from(policy: Policy, board: Board) -> Floats:
    """When that is."""
    return np.asarray(board.busy_until - lookahead(policy, board))


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def late(self) -> bool:
        """Requests wait in the conductor until a prefill worker is about to be free."""

    @property
    def lookahead_s(self) -> float:
        """How long before that a waiting request is bound, so that the worker never stands idle."""

    @property
    def lookahead_both_s(self) -> float:
        """The same (the larger counts) of a worker of role ``both``, which computes several prompts in one step."""

    @property
    def wait_cap_s(self) -> float:
        """Who waited this long is no longer passed over for others."""

    def choose(self, asked: Asked) -> Choice | None:
        """None where nobody usable will do. A late policy is shown busy workers too: where it chooses one that is not about
        to be free, the request keeps its place, and those after it are asked about."""

    def key(self, waiting: Waiting) -> float:
        """Of waiting requests the one with the smallest key goes first. Constant while it waits, so that ageing must be
        linear: remaining seconds - a (now - arrived) orders like remaining seconds + a arrived."""

    def ahead(self, asked: Asked, choice: Choice) -> list[Action]:
        """What to do while the request waits for the worker in ``choice``; late policies only."""

    def follow_up(self, asked: Asked, choice: Choice) -> list[Action]:
        """What else to do once ``choice`` is booked."""
