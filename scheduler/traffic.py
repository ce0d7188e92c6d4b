"""What is coming: rates of work, smoothed with a trend, learned from requests as they arrive and finish.

Work is counted in seconds of a worker, so that it can be compared with workers: a prompt is worth the seconds it computes
after what is cached, an answer the seconds its tokens take of decode steps beyond what a step costs anyhow.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

LEVEL_S = 20.0  # time constant of a rate
TREND_S = 60.0  # and of its change
BIN_S = 1.0
QUIET_S = 300.0  # nothing for so long: what came before says nothing any more
TREND_BOUND = 2.0  # a forecast stays within level / bound and level * bound
ANSWERS = 256  # finished requests whose output lengths are remembered


class Rate:
    """Amount per second: Holt's linear method (level and trend) over bins of one second.

    While less than a time constant has been seen, the level is the plain mean.
    """

    def __init__(self, level_s: float = LEVEL_S, trend_s: float = TREND_S) -> None:
        self._alpha = 1.0 - math.exp(-BIN_S / level_s)
        self._beta = 1.0 - math.exp(-BIN_S / trend_s)
        self._level = self._trend = self._bin = 0.0
        self._bins = 0
        self._began: float | None = None

    def add(self, amount: float, now: float) -> None:
        self._close(now)
        self._bin += amount

    def level(self, now: float) -> float:
        return self.ahead(0.0, now)

    def ahead(self, seconds: float, now: float) -> float:
        """The rate ``seconds`` from ``now`` if it goes on changing as it does."""
        self._close(now)
        if not self._bins:
            return self._bin / BIN_S
        forecast = self._level + self._trend * seconds / BIN_S
        return max(self._level / TREND_BOUND, min(forecast, self._level * TREND_BOUND))

    def _close(self, now: float) -> None:
        if self._began is None or now - self._began > QUIET_S:
            self._began, self._bins, self._bin, self._level, self._trend = now, 0, 0.0, 0.0, 0.0
        while now >= self._began + BIN_S:
            self._began += BIN_S
            self._take(self._bin / BIN_S)
            self._bin = 0.0

    def _take(self, value: float) -> None:
        self._bins += 1
        before = self._level
        alpha = max(self._alpha, 1.0 / self._bins)
        if alpha > self._alpha:  # still a mean: its steps are no trend
            self._level += alpha * (value - before)
            return
        self._level = alpha * value + (1.0 - alpha) * (before + self._trend)
        self._level = max(self._level, 0.0)
        self._trend += self._beta * (self._level - before - self._trend)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of a decode step: seconds it costs anyhow, per sequence, per token of context."""

    base_s: float
    per_sequence_s: float
    per_token_s: float

    def answer_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """What one answer adds to all its steps: each of its tokens reads the context before it."""
        mean_context = prompt_tokens + 0.5 * output_tokens
        return output_tokens * (self.per_sequence_s + self.per_token_s * mean_context)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Rates per second, ``ahead_s`` from now. ``prefill_work`` and ``decode_work`` are workers kept busy."""

    requests: float
    prompt_tokens: float
    computed_tokens: float  # after what is cached
    output_tokens: float
    prefill_work: float
    decode_work: float
    seen_s: float  # how long the traffic has been watched
    answers: int  # finished requests that the output length is known from


class Traffic:
    """Counts every request that asked, refused ones too: what is refused for want of workers is a demand for them."""

    def __init__(self) -> None:
        self._requests, self._prompts, self._computed, self._prefill = Rate(), Rate(), Rate(), Rate()
        self._lengths: deque[int] = deque(maxlen=ANSWERS)
        self._first: float | None = None

    @property
    def mean_output(self) -> float:
        return sum(self._lengths) / len(self._lengths) if self._lengths else 0.0

    def arrived(self, prompt_tokens: int, computed_tokens: int, prefill_s: float, now: float) -> None:
        if self._first is None:
            self._first = now
        self._requests.add(1.0, now)
        self._prompts.add(prompt_tokens, now)
        self._computed.add(computed_tokens, now)
        self._prefill.add(prefill_s, now)

    def finished(self, output_tokens: int) -> None:
        """An answer that came to its own end."""
        self._lengths.append(output_tokens)

    def ahead(self, seconds: float, step: StepCost, now: float) -> Forecast:
        requests = self._requests.ahead(seconds, now)
        prompts = self._prompts.ahead(seconds, now)
        output = self.mean_output
        mean_prompt = prompts / requests if requests > 0.0 else 0.0
        return Forecast(
            requests,
            prompts,
            self._computed.ahead(seconds, now),
            requests * output,
            self._prefill.ahead(seconds, now),
            requests * step.answer_s(mean_prompt, output),
            now - self._first if self._first is not None else 0.0,
            len(self._lengths),
        )
