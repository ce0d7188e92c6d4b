"""One choice of an answer as text: sampled ids in, pieces of text with their log-probabilities out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonpool.cluster.gateway.detokenise import Detokeniser
from moonpool.cluster.gateway.stops import StopMatcher
from moonpool.cluster.gateway.tool_calls.reading import CallPiece, ToolParser
from moonpool.core.request import FinishReason, Sampled


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A sampled id and where its text begins: characters from the start of the output."""

    sampled: Sampled
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one sampled ``id`` adds to the answer; the last piece carries ``finish``. Any part may be empty.

    ``called``: the answer has made calls so far, these or earlier ones.
    """

    text: str
    tokens: tuple[PlacedToken, ...] = ()
    finish: FinishReason | None = None
    id: int | None = None
    calls: tuple[CallPiece, ...] = ()
    called: bool = False


class Choice:
    """Joins the detokeniser and the stop matcher, and keeps each id's log-probability beside its text.

    The id that ended the sequence (end of sequence or a stop id) and the text from a stop string onwards are not part
    of the answer; both count as completion tokens. With ``include_stop`` that id and that stop string are part of it. A stop
    string counts only once ``min_tokens`` ids were sampled.
    ``parser`` finds tool calls in the text; an answer that it calls over has stopped.
    """

    def __init__(
        self,
        detokeniser: Detokeniser,
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        parser: ToolParser | None = None,
    ) -> None:
        self._detokeniser = detokeniser
        self._matcher = StopMatcher(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._parser = parser
        self._called = False
        self._decoded = 0  # characters detokenised
        self._given = 0  # characters given out
        self._waiting: list[tuple[PlacedToken, int]] = []  # (token, where its text ends): held with their text
        self.tokens = 0
        self.finish: FinishReason | None = None

    def push(self, sampled: Sampled | None, finish: FinishReason | None) -> Piece:
        """The next id, and how the attempt ended if it did."""
        piece = self._push(sampled, finish)
        if self._parser is not None:
            piece = self._parsed(piece, self._parser)
        return piece if sampled is None else replace(piece, id=sampled.token)

    def _parsed(self, piece: Piece, parser: ToolParser) -> Piece:
        said = parser.push(piece.text)
        text, calls = said.text, said.calls
        if parser.over and piece.finish is None:
            piece = replace(piece, finish=FinishReason.STOP)
            self.finish = piece.finish
        if piece.finish is not None:
            rest = parser.finish()
            text, calls = text + rest.text, calls + rest.calls
        self._called = self._called or bool(calls)
        return replace(piece, text=text, calls=calls, called=self._called)

    def _push(self, sampled: Sampled | None, finish: FinishReason | None) -> Piece:
        text = ""
        if sampled is not None:
            self.tokens += 1
        if sampled is not None and (finish is not FinishReason.STOP or self._include_stop):
            start = self._decoded
            text, stopped = self._scan(self._detokeniser.push(sampled.token))
            self._waiting.append((PlacedToken(sampled, start), self._decoded))
            if stopped:
                return self._end(text, FinishReason.STOP)
        if finish is None:
            self._given += len(text)
            return Piece(text, self._released())
        rest, stopped = self._scan(self._detokeniser.finish())
        text += rest
        if stopped:
            return self._end(text, FinishReason.STOP)
        return self._end(text + self._matcher.finish(), finish)

    def _scan(self, decoded: str) -> tuple[str, bool]:
        self._decoded += len(decoded)
        return self._matcher.push(decoded, armed=self.tokens >= self._min_tokens)

    def _released(self) -> tuple[PlacedToken, ...]:
        count = 0
        while count < len(self._waiting) and self._waiting[count][1] <= self._given:
            count += 1
        out = tuple(token for token, _ in self._waiting[:count])
        del self._waiting[:count]
        return out

    def _end(self, text: str, finish: FinishReason) -> Piece:
        self.finish = finish
        self._given += len(text)
        kept = tuple(token for token, end in self._waiting if token.offset < self._given or end <= self._given)
        self._waiting.clear()
        return Piece(text, kept, finish)
