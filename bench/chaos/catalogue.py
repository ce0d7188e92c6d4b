"""What clients ask, drawn from a seed: conversations whose prompts share prefixes, greedy and sampled. Pure.

A conversation's later turns hold the answers of its earlier ones, so its questions become whole while the oracle answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

PREFIXES = 6


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, as (least, most)."""

    prefix: tuple[int, int] = (32, 256)
    words: tuple[int, int] = (8, 120)
    answer: tuple[int, int] = (8, 96)
    context: int = 1024


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says in it, and how it is answered."""

    words: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stream: bool


@dataclass(slots=True)
class Conversation:
    prefix: tuple[int, ...]
    turns: tuple[Turn, ...]
    answers: list[tuple[int, ...]] = field(default_factory=list)  # the oracle's, by turn; a turn at a tie ends them

    def prompt(self, turn: int) -> tuple[int, ...]:
        """Needs the answers of all earlier turns."""
        said = [token for t, answer in zip(self.turns[:turn], self.answers, strict=False) for token in (*t.words, *answer)]
        return (*self.prefix, *said, *self.turns[turn].words)


def conversations(count: int, ids: Sequence[int], seed: int, sizes: Sizes) -> list[Conversation]:
    """``ids`` are (least, one past the largest) token id that a client may send."""
    rng = np.random.default_rng(seed)

    def words(span: tuple[int, int]) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(ids[0], ids[1], int(rng.integers(span[0], span[1] + 1))))

    prefixes = [words(sizes.prefix) for _ in range(PREFIXES)]
    found = []
    for _ in range(count):
        prefix, left, turns = prefixes[int(rng.integers(PREFIXES))], sizes.context, []
        left -= len(prefix)
        for _ in range(int(rng.integers(1, 4))):
            sampled = bool(rng.random() < 0.4)
            turn = Turn(
                words=words(sizes.words),
                max_tokens=int(rng.integers(sizes.answer[0], sizes.answer[1] + 1)),
                temperature=0.8 if sampled else 0.0,
                seed=int(rng.integers(1 << 31)),
                stream=bool(rng.random() < 0.6),
            )
            left -= len(turn.words) + turn.max_tokens
            if left < 0:
                break
            turns.append(turn)
        found.append(Conversation(prefix, tuple(turns)))
    return found
