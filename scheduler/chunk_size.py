"""How many tokens of a prompt fit into a step beside answers that wait for it, from what steps took on this worker. Pure.

A step's time is a sum of five terms, learned by recursive least squares with forgetting (Ljung, System Identification, 1999,
section 11.2) on relative errors. Directions in which nothing was measured lately forget no further than the first guess
was unsure, so an hour of plain decode steps does not make the cost of a prompt's token wander. One step that took far longer or
shorter than expected moves the estimate as far as three standard deviations would.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf, isfinite, sqrt

from moonpool.core.gaps import Room

# A base, an answer's row, a token of its context, a prompt's token, a pair of such a token and one it attends to: seconds.
GUESS = (5e-3, 1e-3, 1e-7, 1e-3, 1e-7)
UNSURE = 100.0  # standard deviation of the guess, times the guess
NOISE = 0.1  # of one measurement, relative
FORGET = 0.99  # what a measurement weighs, for each one after it
MOST_DEVIATIONS = 3.0
PLAUSIBLE_S = (1e-6, 1e5)
FIRST_TRY = 64  # tokens of the first chunk, and growth by so many times from then on: no leap beyond what was measured
GROWTH = 2
ENOUGH = 1 << 20  # tokens, where nothing limits them


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
        """In units of ``GUESS``."""
        return tuple(g * n for g, n in zip(GUESS, (1.0, self.rows, self.context, self.tokens, self.pairs), strict=True))


class StepCost:
    """What a step takes here. Sane from the first one on; each measurement costs some ten microseconds."""

    def __init__(self) -> None:
        n = len(GUESS)
        self._times = [1.0] * n  # of the guess
        self._unsure = [[UNSURE**2 if i == j else 0.0 for j in range(n)] for i in range(n)]  # covariance of ``_times``
        self._largest = 0  # tokens of a chunk that was measured

    def add(self, work: Work, seconds: float) -> None:
        """``work`` took ``seconds``; what is impossible is skipped."""
        if not PLAUSIBLE_S[0] <= seconds <= PLAUSIBLE_S[1]:
            return
        self._largest = max(self._largest, work.tokens)
        x = [term / seconds for term in work.terms]
        px = [sum(p * value for p, value in zip(row, x, strict=True)) for row in self._unsure]
        variance = NOISE**2 + sum(a * b for a, b in zip(px, x, strict=True))
        error = 1.0 - sum(t * value for t, value in zip(self._times, x, strict=True))
        most = MOST_DEVIATIONS * sqrt(variance)
        error = min(max(error, -most), most)
        self._times = [max(t + p * error / variance, 0.0) for t, p in zip(self._times, px, strict=True)]
        self._unsure = _bounded(
            [
                [(p - a * b / variance) / FORGET for p, b in zip(row, px, strict=True)]
                for row, a in zip(self._unsure, px, strict=True)
            ]
        )

    def seconds(self, work: Work) -> float:
        return sum(t * term for t, term in zip(self._times, work.terms, strict=True))

    def prompt_seconds(self, start: int, end: int, chunk: int) -> float:
        """Tokens [start, end) of a prompt by themselves, ``chunk`` at a time."""
        whole = Work().with_chunk(start, end)
        return self.seconds(whole) + (ceil(whole.tokens / chunk) - 1) * self.seconds(Work())

    def tokens_within(self, limit_s: float, beside: Work, start: int) -> int:
        """How many tokens of a prompt, from ``start`` on, fit into a step of ``limit_s`` that does ``beside`` anyway."""
        rest = limit_s - self.seconds(beside)
        if rest <= 0.0:
            return 0
        pair = self._times[4] * GUESS[4]
        token = self._times[3] * GUESS[3] + pair * (start + 0.5)
        if not isfinite(rest) or token <= 0.0:
            return self._reach(ENOUGH)
        # token n + pair n^2 / 2 = rest
        return self._reach(int(2.0 * rest / (token + sqrt(token * token + 2.0 * pair * rest))))

    def _reach(self, tokens: int) -> int:
        return min(tokens, max(FIRST_TRY, GROWTH * self._largest))


def _bounded(unsure: list[list[float]]) -> list[list[float]]:
    """Nothing is less sure than at first. Scaling rows and columns alike keeps a covariance one."""
    by = [min(1.0, UNSURE / sqrt(max(unsure[i][i], 1e-300))) for i in range(len(unsure))]
    return [[p * a * b for p, b in zip(row, by, strict=True)] for row, a in zip(unsure, by, strict=True)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Of ``total`` tokens, ``done`` of them computed; its first id is wanted within ``due_s`` from now (infinite: any time)."""

    done: int
    total: int
    due_s: float = inf


@dataclass(frozen=True, slots=True)
class Chunking:
    """``most``: tokens of a chunk; ``least`` are computed whatever they take, so that a prompt gets on."""

    most: int
    least: int

    def tokens(self, cost: StepCost, beside: Work, room: Room, prompt: Prompt) -> int:
        """Of the next chunk, beside a step's other ``beside``: may be below ``least``.

        As many as leave the answers their steady pace; where the prompt would then miss its target and need not, as many as
        they can bear.
        """
        if room.free:
            return self.most
        steady = cost.tokens_within(room.steady_s, beside, prompt.done)
        if self._late(cost, room, prompt, max(steady, self.least)):
            steady = cost.tokens_within(room.most_s, beside, prompt.done)
        return min(steady, self.most)

    def _late(self, cost: StepCost, room: Room, prompt: Prompt, steady: int) -> bool:
        if prompt.due_s == inf:
            return False
        steps = ceil((prompt.total - prompt.done) / min(steady, self.most))
        return steps * room.steady_s > prompt.due_s >= cost.prompt_seconds(prompt.done, prompt.total, self.most)
