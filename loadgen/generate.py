"""An agentic request trace from stated distributions: sessions that call tools in a loop, on shared system prompts.

A session starts (Poisson), opens with one of a few system prompts and a first question, and then takes turns. Every turn is
one request whose prompt is the whole conversation so far. After its answer the session either goes round its tool loop (a
short gap, a tool's result is appended) or asks its user (a longer gap, a new question). Contexts only grow; a session ends
after its turns or when the next prompt would pass ``max_prompt``.

    session starts        Poisson, ``sessions_per_s``
    system prompt         uniform over ``system_prompts`` fixed texts; length log-normal around ``system_tokens``
    question, tool result log-normal around ``question_tokens`` / ``tool_tokens`` (medians), spread ``length_sigma``
    output                log-normal around ``output_tokens``, clipped to [``output_least``, ``output_most``]
    turns                 geometric, mean ``turns``
    tool loop or user     a turn is followed by a tool call with probability ``tool_share``
    gap after an answer   exponential, mean ``tool_gap_s`` or ``user_gap_s``, after the answer's own time, which is taken
                          as ``answer_s`` + output x ``token_s``

Ids follow the format: one per ``block_tokens`` tokens, equal exactly where the whole prefix is equal, dense from 0 in order
of first use. Outputs become part of the next prompt, as in a real conversation. One seed gives one trace, byte for byte.

The defaults make a demonstration of 2 to 3 minutes for a 135M-parameter model on 2 cores: 40 requests with prompts around 600
tokens at about 0.3 requests/s, 16 to 48 tokens of output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random

from moonpool.core.errors import ConfigError
from moonpool.loadgen.trace import TraceRow


@dataclass(frozen=True, slots=True)
class GeneratorConfig:
    """See the module for what each value does. Lengths are tokens, times seconds."""

    requests: int = 40
    seed: int = 1
    block_tokens: int = 64  # tokens per hash id; the published traces use 512
    sessions_per_s: float = 0.07
    system_prompts: int = 3
    system_tokens: int = 320
    question_tokens: int = 90
    tool_tokens: int = 60
    length_sigma: float = 0.4
    output_tokens: int = 28
    output_least: int = 16
    output_most: int = 48
    turns: float = 4.0
    tool_share: float = 0.8
    tool_gap_s: float = 2.0
    user_gap_s: float = 12.0
    answer_s: float = 1.0
    token_s: float = 0.05
    max_prompt: int = 2_000

    def check(self) -> None:
        """ConfigError naming the first value out of range."""
        least: dict[str, float] = {
            "requests": 1, "block_tokens": 1, "system_prompts": 1, "system_tokens": 1, "question_tokens": 1, "tool_tokens": 1,
            "output_tokens": 1, "output_least": 1, "output_most": self.output_least, "turns": 1, "max_prompt": 1,
        }  # fmt: skip
        for f in fields(self):
            value = getattr(self, f.name)
            if not math.isfinite(value) or value < least.get(f.name, 0):
                raise ConfigError(f"{f.name}: {value} is out of range; use {least.get(f.name, 0)} or more", param=f.name)
        if self.sessions_per_s == 0:
            raise ConfigError("sessions_per_s: 0 never starts a session; use a rate above 0", param="sessions_per_s")
        if self.tool_share > 1:
            raise ConfigError(f"tool_share: {self.tool_share} is no probability; use 0 to 1", param="tool_share")


@dataclass(frozen=True, slots=True)
class _Piece:
    """``length`` tokens of one text; ``text`` names it over all sessions."""

    text: int
    length: int


class _Blocks:
    """Hands out ids: a block is known by the id before it and the stretches of text it holds."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._known: dict[tuple[int, tuple[tuple[int, int, int], ...]], int] = {}

    def ids(self, pieces: list[_Piece]) -> tuple[int, ...]:
        out: list[int] = []
        before = -1
        for stretches in self._cut(pieces):
            before = self._known.setdefault((before, stretches), len(self._known))
            out.append(before)
        return tuple(out)

    def _cut(self, pieces: list[_Piece]) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Blocks as tuples of (text, first token, end token)."""
        block: list[tuple[int, int, int]] = []
        room = self._size
        for piece in pieces:
            done = 0
            while done < piece.length:
                take = min(room, piece.length - done)
                block.append((piece.text, done, done + take))
                done, room = done + take, room - take
                if room == 0:
                    yield tuple(block)
                    block, room = [], self._size
        if block:
            yield tuple(block)


@dataclass(frozen=True, slots=True)
class _Turn:
    at_s: float
    pieces: list[_Piece]
    output: int


class _Author:
    """Draws sessions. One generator for all draws: the order of drawing is part of what a seed means."""

    def __init__(self, config: GeneratorConfig) -> None:
        self._config = config
        self._random = Random(config.seed)
        self._texts = 0
        self._systems = [self._piece(config.system_tokens) for _ in range(config.system_prompts)]

    def next_start(self, after_s: float) -> float:
        return after_s + self._random.expovariate(self._config.sessions_per_s)

    def session(self, start_s: float) -> list[_Turn]:
        c, random = self._config, self._random
        pieces = [random.choice(self._systems), self._piece(c.question_tokens)]
        at = start_s
        turns: list[_Turn] = []
        while sum(p.length for p in pieces) <= c.max_prompt:
            output = min(max(self._length(c.output_tokens), c.output_least), c.output_most)
            turns.append(_Turn(at, list(pieces), output))
            if random.random() < 1 / c.turns:
                break
            tool = random.random() < c.tool_share
            gap = c.tool_gap_s if tool else c.user_gap_s
            at += c.answer_s + output * c.token_s + (random.expovariate(1 / gap) if gap > 0 else 0.0)
            pieces.append(self._text(output))
            pieces.append(self._piece(c.tool_tokens if tool else c.question_tokens))
        return turns

    def _piece(self, median: int) -> _Piece:
        return self._text(self._length(median))

    def _text(self, length: int) -> _Piece:
        self._texts += 1
        return _Piece(self._texts, length)

    def _length(self, median: int) -> int:
        return max(1, round(self._random.lognormvariate(math.log(median), self._config.length_sigma)))


def generate_trace(config: GeneratorConfig) -> list[TraceRow]:
    """``config.requests`` rows in time order, the first one at 0 ms."""
    config.check()
    author = _Author(config)
    turns: list[_Turn] = []
    start = 0.0
    empty = 0
    while sum(t.at_s <= start for t in turns) < config.requests:  # a later session cannot come before these
        session = author.session(start)
        empty = 0 if session else empty + 1
        if empty > 1_000:
            raise ConfigError(
                f"max_prompt: {config.max_prompt} is below every first prompt; raise it or lower system_tokens",
                param="max_prompt",
            )
        turns.extend(session)
        start = author.next_start(start)
    turns.sort(key=lambda t: t.at_s)
    blocks = _Blocks(config.block_tokens)
    first = turns[0].at_s
    return [
        TraceRow(
            timestamp_ms=round((t.at_s - first) * 1e3),
            input_length=sum(p.length for p in t.pieces),
            output_length=t.output,
            hash_ids=blocks.ids(t.pieces),
        )
        for t in turns[: config.requests]
    ]
