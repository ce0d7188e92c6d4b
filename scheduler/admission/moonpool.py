"""Refuses on arrival what would probably miss its targets, or make others miss theirs; never drops it later.

Predicted TTFT, and the longest decode step around the time the prompt joins its batch, over their targets, are turned into
chances of a miss by curves learned from how accepted requests ended. Capacity may be kept for higher priorities and from
tenants that had more than their fair share. What nothing sure can be said of is let in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moonpool.core.errors import Reason
from moonpool.core.membership import LiveAttempt
from moonpool.core.placement import Finished, Refusal
from moonpool.scheduler.admission.decode_peak import decode_peak
from moonpool.scheduler.admission.headroom import Headroom, Withheld
from moonpool.scheduler.admission.loads import MAX_RETRY_S, MIN_RETRY_S
from moonpool.scheduler.admission.miss_curve import MissCurve
from moonpool.scheduler.admission.queue_bounds import QueueBounds
from moonpool.scheduler.board import UNLIMITED, Board
from moonpool.scheduler.choice import Option
from moonpool.scheduler.decode_forecast import AHEAD_S, Expected, course
from moonpool.scheduler.ledger import Cost, TenantLedger
from moonpool.scheduler.output_length import OutputLengths
from moonpool.scheduler.policy import Asked

REMEMBERED = 20_000  # accepted requests that have not ended
FIRST_ANSWER_TOKENS = 200.0  # of an answer, until some have ended; what an accepted request is charged with at first
ANSWER_MEMORY = 500  # answers that the mean is over
KV_HELD_S = 30.0  # how long a prompt's KV takes up a decode worker, for the ledger


@dataclass(frozen=True, slots=True)
class _Judged:
    """One target: latency predicted alone and under load, over the target and as the curves see it."""

    target_s: float
    alone_s: float
    full_s: float
    ratio: float  # full over target
    chance: float  # of a miss, withheld capacity counted

    @property
    def told(self) -> str:
        return f"{self.full_s * 1e3:.0f} ms, target {self.target_s * 1e3:.0f} ms: missed with a chance of {self.chance:.2f}"


@dataclass(frozen=True, slots=True)
class _Accepted:
    tenant: str
    ttft: _Judged | None
    tbt: _Judged | None
    turn: int
    prompt_tokens: int
    decode_s: float  # charged for an answer of usual length
    token_s: float  # and what one token of it costs


class MoonpoolAdmission:
    name = "moonpool"

    def __init__(
        self,
        chance: float = 0.25,
        window_s: float = 5.0,
        reserve: float = 0.1,
        fair: float = 0.2,
        half_life_s: float = 60.0,
        priority_seen_s: float = 60.0,
        queued_tokens: float = 8e6,
        queued_requests: float = 4_096.0,
    ) -> None:
        """``chance``: of missing a target, above which a request is refused. ``window_s``: after joining a batch, in which a
        decode step counts. The others: see ``Headroom``, ``TenantLedger`` and ``QueueBounds``."""
        self.ledger = TenantLedger(half_life_s=half_life_s)
        self.ttft_curve, self.tbt_curve = MissCurve(), MissCurve()
        self._chance = chance
        self._window_s = window_s
        self._headroom = Headroom(self.ledger, reserve=reserve, fair=fair, seen_s=priority_seen_s)
        self._bounds = QueueBounds(queued_tokens, queued_requests)
        self._board: Board | None = None  # whose offers the ledger knows
        self._accepted: dict[tuple[str, int], _Accepted] = {}
        self._lengths = OutputLengths()
        self.judged: Mapping[str, float] = {}
        self._answer_tokens, self._answers = FIRST_ANSWER_TOKENS, 0

    @property
    def open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._accepted)

    def admit(self, asked: Asked, option: Option) -> Refusal | None:
        if asked.board is not self._board:  # workers came or went
            self._board = asked.board
            self.ledger.offer(_offers(asked))
        self.ledger.weigh(asked.request.tenant, asked.request.weight)
        withheld = self._headroom.of(asked.request, asked.now)
        refused = self._bounds.refuse(asked, option, withheld)
        if refused is not None:
            return refused
        ttft, tbt = self._judge_ttft(asked, option, withheld), self._judge_tbt(asked, option, withheld)
        kept = 1.0
        for judged in (ttft, tbt):
            kept *= 1.0 if judged is None else 1.0 - judged.chance
        others = self.ttft_curve.chance(asked.pressed) if asked.pressed else 0.0  # of somebody who waits, for its sake
        kept *= 1.0 - others
        self.judged = {
            "ttft_chance": 0.0 if ttft is None else ttft.chance,
            "tbt_chance": 0.0 if tbt is None else tbt.chance,
            "others_chance": others,
            "chance_allowed": self._chance,
            "withheld_share": withheld.share,
        }
        if 1.0 - kept > self._chance:
            return self._refuse(asked, option, ttft, tbt, withheld)
        self._accept(asked, option, ttft, tbt)
        self._delay(asked)
        return None

    def recheck(self, asked: Asked, option: Option) -> Refusal | None:
        return None

    # -- judging -------------------------------------------------------------------------------------------------------

    def _judge_ttft(self, asked: Asked, option: Option, withheld: Withheld) -> _Judged | None:
        target_ms = asked.request.targets.ttft_ms
        if target_ms is None or not option.ttft.sure:
            return None
        full = option.ttft.likely
        return _judged(self.ttft_curve, withheld, target_ms / 1e3, max(full - option.wait_s, 0.0), full)

    def _judge_tbt(self, asked: Asked, option: Option, withheld: Withheld) -> _Judged | None:
        target_ms = asked.request.targets.tbt_ms
        if target_ms is None:
            return None
        peak = decode_peak(asked, option.decode, option.ttft.likely, self._window_s, target_ms / 1e3)
        return _judged(self.tbt_curve, withheld, target_ms / 1e3, peak.alone_s, peak.full_s) if peak.sure else None

    def _refuse(self, asked: Asked, option: Option, ttft: _Judged | None, tbt: _Judged | None, withheld: Withheld) -> Refusal:
        names, parts, retry_s = asked.board.names, [], MIN_RETRY_S
        if ttft is not None and ttft.chance > 0.0:
            idle = ttft.alone_s > self.ttft_curve.highest(self._chance) * ttft.target_s
            hint = ", and an idle worker would probably miss it too: raise the target or shorten the prompt" if idle else ""
            waits = f"{option.wait_s * 1e3:.0f} ms of it is waiting at {names[option.prefill]}"
            parts.append(f"predicted time to first token {ttft.told}; {waits}{hint}")
            retry_s = max(retry_s, self._drained_s(ttft, option, withheld))
        if tbt is not None and tbt.chance > 0.0:
            parts.append(f"predicted time between tokens {tbt.told} at {names[option.decode]}")
            retry_s = max(retry_s, self._departed_s(asked, option.decode, tbt, withheld))
        if asked.pressed and self.judged["others_chance"] > 0.0:
            parts.append(f"with it a request that waits already would use {asked.pressed:.2f} of its target")
            retry_s = max(retry_s, option.work_s)
        parts.append(f"requests are let in up to a chance of {self._chance:.2f}")
        if withheld.text:
            parts.append(withheld.text)
        return Refusal(Reason.TARGETS_MISSED, "; ".join(parts), min(retry_s, MAX_RETRY_S))

    def _drained_s(self, ttft: _Judged, option: Option, withheld: Withheld) -> float:
        """Until so much of the queue is computed that this request would be let in; nobody else taken to arrive."""
        allowed = self.ttft_curve.highest(self._chance) * ttft.target_s - ttft.alone_s
        return min(max(option.wait_s - max(allowed, 0.0) * (1.0 - withheld.share), 0.0), option.wait_s)

    def _departed_s(self, asked: Asked, row: int, tbt: _Judged, withheld: Withheld) -> float:
        """Until so many answers have ended at its decode worker that it would be let in; nobody else taken to arrive."""
        others_s = tbt.full_s - tbt.alone_s
        allowed_s = (self.tbt_curve.highest(self._chance) * tbt.target_s - tbt.alone_s) * (1.0 - withheld.share)
        if allowed_s >= others_s:
            return 0.0
        fit = tuple(float(x) for x in asked.board.step_fit[:, row])
        running = [self._expected(attempt) for attempt in asked.board.workers[row].attempts]
        ahead = course(running, self._lengths, fit, asked.now)
        now_s = max(float(ahead.step_s[0]) - fit[0], 1e-9)
        roomy = others_s * (ahead.step_s - fit[0]) / now_s <= max(allowed_s, 0.0)
        return float(AHEAD_S[int(roomy.argmax())]) if roomy.any() else float(AHEAD_S[-1])

    def _expected(self, attempt: LiveAttempt) -> Expected:
        mine = self._accepted.get((attempt.request, attempt.attempt))
        tenant, turn = ("", 0) if mine is None else (mine.tenant, mine.turn)
        kind = self._lengths.kind(tenant, turn, attempt.prompt_tokens)
        most = attempt.remaining_tokens
        return Expected(attempt.prompt_tokens + attempt.output_tokens, attempt.output_tokens, most, kind)

    # -- what is learned -----------------------------------------------------------------------------------------------

    def _accept(self, asked: Asked, option: Option, ttft: _Judged | None, tbt: _Judged | None) -> None:
        board, request, tokens = asked.board, asked.request, asked.prompt.tokens
        answer = min(self._answer_tokens, float(request.max_tokens))
        _, b, c = (float(x) for x in board.step_fit[:, option.decode])
        token_s = b + c * (tokens + 0.5 * answer)
        plan, kv_bytes = option.plan, tokens * board.block_bytes / asked.prompt.block_tokens
        moved = max(plan.until - plan.local - plan.front, 0) * board.block_bytes if plan.source is not None else 0
        self.ledger.charge(request.tenant, Cost(option.work_s + token_s * answer, kv_bytes, moved), asked.now)
        key = request.request, request.attempt
        self._accepted.pop(key, None)
        self._accepted[key] = _Accepted(request.tenant, ttft, tbt, request.turn, tokens, token_s * answer, token_s)
        if len(self._accepted) > REMEMBERED:
            del self._accepted[next(iter(self._accepted))]

    def _delay(self, asked: Asked) -> None:
        """What is predicted now of those whom the newest delays is what the curves are to be judged by."""
        for one, ttft_s in asked.delayed:
            known = self._accepted.get((one.request.request, one.request.attempt))
            if known is not None and known.ttft is not None:
                judged = replace(known.ttft, full_s=ttft_s, ratio=ttft_s / known.ttft.target_s)
                self._accepted[one.request.request, one.request.attempt] = replace(known, ttft=judged)

    def finished(self, done: Finished, now: float) -> None:
        """What an answer really took is put right in the ledger; its latencies teach the curves."""
        accepted = self._accepted.pop((done.request, done.attempt), None)
        if accepted is None:
            return
        self.ledger.charge(accepted.tenant, Cost(accepted.token_s * done.output_tokens - accepted.decode_s), now)
        ended = done.outcome == "ok"
        self._lengths.add(accepted.tenant, accepted.turn, accepted.prompt_tokens, done.output_tokens, ended=ended)
        if not ended or done.ttft_ms <= 0.0:
            return
        self._answers = min(self._answers + 1, ANSWER_MEMORY)
        self._answer_tokens += (done.output_tokens - self._answer_tokens) / self._answers
        if accepted.ttft is not None and done.attempt <= 1:
            self.ttft_curve.add(accepted.ttft.ratio, done.ttft_ms / 1e3 / accepted.ttft.target_s)
        if accepted.tbt is not None and done.output_tokens > 1:
            self.tbt_curve.add(accepted.tbt.ratio, done.tbt_ms / 1e3 / accepted.tbt.target_s)


def _judged(curve: MissCurve, withheld: Withheld, target_s: float, alone_s: float, full_s: float) -> _Judged:
    chance = curve.chance(withheld.over_target(alone_s, full_s, target_s))
    return _Judged(target_s, alone_s, full_s, full_s / target_s, chance)


def _offers(asked: Asked) -> Cost:
    """What the workers on the board and the links between their nodes can do in a second; 0 for what is not known."""
    board = asked.board
    tokens = sum(int(room) for room, decodes in zip(board.room, board.decode_only | board.both, strict=True) if decodes)
    byte = board.block_bytes / asked.prompt.block_tokens
    link = asked.links.fit
    cost = link.coefficients[1] if link.sure else 0.0
    nodes = len(set(board.nodes))
    return Cost(
        float(len(board.workers)), tokens * byte / KV_HELD_S if tokens < UNLIMITED else 0.0, nodes / cost if cost else 0.0
    )
