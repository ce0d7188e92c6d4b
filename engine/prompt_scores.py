"""Log-probabilities of one prompt's ids, collected chunk by chunk until the prompt is computed. Pure.

Chunks may be of any size and may come again after a preemption; what is known already is not lost by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import Bug
from moonpool.core.request import Attempt, PromptLogprobs

PART_VALUES = 32_768  # log-probabilities in one message: about 300 KB


@dataclass(frozen=True, slots=True)
class Scores:
    """Of n ids that follow one another: ``logprobs`` and ``ranks`` [n], the likeliest ids and theirs [n, width]."""

    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]
    top_tokens: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


class PromptScores:
    """Of a prompt of ``tokens`` tokens; the first one has none. One writer at a time."""

    def __init__(self, tokens: int, width: int) -> None:
        """``width``: alternatives beside each id."""
        self.width = width
        self._tokens = tokens
        n = max(tokens - 1, 0)
        self._all = Scores(
            np.zeros(n, np.float32), np.zeros(n, np.int64), np.zeros((n, width), np.int64), np.zeros((n, width), np.float32)
        )
        self.done = 0  # leading tokens whose successors' log-probabilities are known

    @classmethod
    def of(cls, attempt: Attempt) -> PromptScores | None:
        """None where the attempt wants none."""
        width = attempt.prompt_logprobs
        return None if width is None else cls(len(attempt.request.prompt), width)

    @property
    def complete(self) -> bool:
        return self.done >= self._tokens - 1

    def wanted(self, start: int, end: int) -> int:
        """Of the tokens [start, end), how many leading ones have a successor in the prompt."""
        return max(min(end, self._tokens - 1) - start, 0)

    def put(self, start: int, scores: Scores) -> None:
        """``scores`` of the successors of the tokens from ``start`` on."""
        if start > self.done:
            raise Bug(f"prompt log-probabilities: told from {start} on, known up to {self.done}")
        end = start + len(scores.logprobs)
        self._all.logprobs[start:end] = scores.logprobs
        self._all.ranks[start:end] = scores.ranks
        self._all.top_tokens[start:end] = scores.top_tokens
        self._all.top_logprobs[start:end] = scores.top_logprobs
        self.done = max(self.done, end)

    def parts(self) -> Iterator[PromptLogprobs]:
        """All of it, in messages of bounded size."""
        step, known = positions_per_part(self.width), self._all
        for at in range(0, len(known.logprobs), step):
            here = slice(at, at + step)
            yield PromptLogprobs(
                at + 1,
                self.width,
                tuple(known.logprobs[here].tolist()),
                tuple(known.ranks[here].tolist()),
                tuple(known.top_tokens[here].ravel().tolist()),
                tuple(known.top_logprobs[here].ravel().tolist()),
            )


def positions_per_part(width: int) -> int:
    return max(PART_VALUES // (width + 1), 1)
