"""How many tokens of a prompt fit into a step beside answers that wait for it, from what steps took on this worker. Pure.

A step's time is a sum of five terms, fitted online (``scheduler.estimates``), times how much slower steps were lately: a fit
over hundreds of steps does not see at once that somebody else uses the cores. What was never measured costs what was guessed,
so chunks grow from a small one on by what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite, sqrt

from moonpool.core.gaps import Room
from moonpool.scheduler.estimates import PLAUSIBLE_S, OnlineFit

# A base, an answer's row, a token of its context, a prompt's token, a pair of such a token and one it attends to: seconds.
GUESS = (5e-3, 1e-3, 1e-7, 1e-3, 1e-7)
GUESS_WEIGHT = 1e-4  # in measurements: it decides what they leave open
SURPRISES = 2.0  # steps outside the bounds of the fit until it is made anew: chunks are sized by it at once
FIRST_TRY = 64  # tokens of the first chunk, and growth by so many times from then on: no leap beyond what was measured
GROWTH = 2
GAIN = 0.1  # of one step in what they take lately, as a power;
MOST_OFF = 2.0  # and a single one counts as at most so many times slower or faster
ENOUGH = 1 << 20  # tokens, where nothing limits them
USUAL = 512  # tokens of a chunk, at most, whose time is not asked for where no answer waits
UNHURRIED_S = 0.5  # of a larger one: whoever comes, or is cancelled, meanwhile waits for its end


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step: ``rows`` of answers that read ``context`` tokens in all, ``tokens`` of prompts that attend to ``pairs``."""

    rows: int = 0
    context: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def with_row(self, context: int) -> Work:
        return Work(self.rows + 1, self.context + context, self.tokens, self.pairs)

    def with_chunk(self, start: int, end: int) -> Work:
        """Tokens [start, end) of a prompt, each of which attends to itself and all before it."""
        pairs = (end - start) * (start + end + 1) / 2
        return Work(self.rows, self.context, self.tokens + end - start, self.pairs + pairs)

    @property
    def terms(self) -> tuple[float, ...]:
        return (1.0, float(self.rows), float(self.context), float(self.tokens), self.pairs)


class StepCost:
    """What a step takes here: sane from the first one on."""

    def __init__(self) -> None:
        self._online = OnlineFit(GUESS, GUESS, seed_weight=GUESS_WEIGHT, surprises=SURPRISES)
        self._lately = 1.0  # measured over fitted
        self._largest = 0  # tokens of a chunk that was measured

    def add(self, work: Work, seconds: float) -> None:
        """``work`` took ``seconds``; what is impossible is skipped."""
        if not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        expected = self.seconds(work)
        if expected > 0.0:
            self._lately *= min(max(seconds / expected, 1.0 / MOST_OFF), MOST_OFF) ** GAIN
        self._online.add(work.terms, seconds, work.context + work.tokens)
        self._largest = max(self._largest, work.tokens)

    def seconds(self, work: Work) -> float:
        return self._lately * sum(c * term for c, term in zip(self._online.fit.coefficients, work.terms, strict=True))

    def prompt_seconds(self, start: int, end: int, chunk: int) -> float:
        """Tokens [start, end) of a prompt by themselves, ``chunk`` at a time."""
        whole = Work().with_chunk(start, end)
        return self.seconds(whole) + (ceil(whole.tokens / chunk) - 1) * self.seconds(Work())

    def tokens_within(self, limit_s: float, beside: Work, start: int) -> int:
        """How many tokens of a prompt, from ``start`` on, fit into a step of ``limit_s`` that does ``beside`` anyway."""
        rest = limit_s - self.seconds(beside)
        if rest <= 0.0:
            return 0
        token, pair = (self._lately * c for c in self._online.fit.coefficients[3:])
        token += pair * (start + 0.5)
        if not isfinite(rest) or token <= 0.0:
            return self._reach(ENOUGH)
        # token n + pair n^2 / 2 = rest
        return self._reach(int(2.0 * rest / (token + sqrt(token * token + 2.0 * pair * rest))))

    def _reach(self, tokens: int) -> int:
        return min(tokens, max(FIRST_TRY, GROWTH * self._largest))


def unhurried(cost: StepCost, beside: Work, start: int, most: int) -> int:
    """Tokens of a prompt, from ``start`` on, in a step beside ``beside`` that no answer waits for: larger chunks take less per
    token (weights and earlier keys are read once for all of them), so as many as are over within ``UNHURRIED_S``, and ``USUAL``
    in any case; ``most`` at most.
    """
    return min(most, max(USUAL - beside.tokens, cost.tokens_within(UNHURRIED_S, beside, start)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Of ``total`` tokens, ``done`` of them computed; its first id is wanted within ``due_s`` from now (infinite: any time)."""

    done: int
    total: int
    due_s: float = inf


@dataclass(frozen=True, slots=True)
class Chunking:
    """``most``: tokens of a chunk, whoever waits."""

    most: int

    def tokens(self, cost: StepCost, beside: Work, room: Room, prompt: Prompt) -> int:
        """Of the next chunk, beside a step's other ``beside``; may be none.

        As many as leave the answers their steady pace; where the prompt would then miss its target and need not, as many as
        they can bear.
        """
        if room.free:
            return unhurried(cost, beside, prompt.done, self.most)
        limit_s = room.most_s if self._hurries(cost, beside, room, prompt) else room.steady_s
        return min(cost.tokens_within(limit_s, beside, prompt.done), self.most)

    def _hurries(self, cost: StepCost, beside: Work, room: Room, prompt: Prompt) -> bool:
        if prompt.due_s == inf:
            return False
        beside_s = cost.seconds(beside)
        share = max(room.steady_s - beside_s, 0.0) / room.steady_s if room.steady_s > 0.0 else 0.0  # of each step
        alone_s = cost.prompt_seconds(prompt.done, prompt.total, self.most)
        return alone_s <= prompt.due_s and alone_s > share * prompt.due_s
