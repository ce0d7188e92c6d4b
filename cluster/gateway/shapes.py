"""Answers in OpenAI's shapes: plain dictionaries from pieces of text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moonpool.cluster.gateway.choice import Piece, PlacedToken
from moonpool.core.request import FinishReason, Sampled

JSON = dict[str, Any]
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI says this


@dataclass(frozen=True, slots=True)
class Usage:
    """``prompt`` is the true length; ``cached`` the prompt tokens not computed anew, wherever their KV came from."""

    prompt: int
    completion: int
    cached: int

    def json(self) -> JSON:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def opening(self, index: int) -> list[JSON]:
        """Chunks before the first text of choice ``index``."""

    def chunk(self, index: int, piece: Piece) -> JSON | None:
        """The piece as a chunk; None where it would say nothing."""

    def usage_chunk(self, usage: Usage) -> JSON: ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> JSON:
        """The answer in one object: the pieces of every choice."""


@dataclass(frozen=True, slots=True)
class Names:
    """``name_bytes(id)``: the id's text, special tokens by their name."""

    name_bytes: Callable[[int], bytes]

    def text(self, token: int) -> str:
        """Bytes that are no whole characters are shown as OpenAI shows them, so different ids keep different names."""
        raw = self.name_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finish(piece: Piece) -> str | None:
    return piece.finish.value if piece.finish is not None else None


def _number(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Sequence[Piece]) -> list[PlacedToken]:
    return [token for piece in pieces for token in piece.tokens]


def _last_finish(pieces: Sequence[Piece]) -> str:
    finish = next((p.finish for p in reversed(pieces) if p.finish is not None), FinishReason.LENGTH)
    return finish.value


class ChatShape:
    def __init__(self, *, id: str, model: str, created: int, names: Names, logprobs: bool) -> None:
        self._id = f"chatcmpl-{id}"
        self._rest: JSON = {"created": created, "model": model}
        self._names = names
        self._logprobs = logprobs

    def _chunk(self, choices: list[JSON]) -> JSON:
        return {"id": self._id, "object": "chat.completion.chunk", **self._rest, "choices": choices}

    def opening(self, index: int) -> list[JSON]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def chunk(self, index: int, piece: Piece) -> JSON | None:
        logprobs = self._content(piece.tokens)
        if not piece.text and not logprobs and piece.finish is None:
            return None
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": _finish(piece)}])

    def usage_chunk(self, usage: Usage) -> JSON:
        return {**self._chunk([]), "usage": usage.json()}

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> JSON:
        out = [
            {
                "index": index,
                "message": {"role": "assistant", "content": _text(pieces), "refusal": None},
                "logprobs": self._content(_tokens(pieces), always=True),
                "finish_reason": _last_finish(pieces),
            }
            for index, pieces in enumerate(choices)
        ]
        return {"id": self._id, "object": "chat.completion", **self._rest, "choices": out, "usage": usage.json()}

    def _content(self, tokens: Sequence[PlacedToken], *, always: bool = False) -> JSON | None:
        if not self._logprobs or not (tokens or always):
            return None
        return {"content": [self._entry(t.sampled) for t in tokens], "refusal": None}

    def _entry(self, sampled: Sampled) -> JSON:
        top = [self._one(t.token, t.logprob) for t in sampled.top]
        return {**self._one(sampled.token, sampled.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float | None) -> JSON:
        raw = self._names.name_bytes(token)
        return {"token": self._names.text(token), "logprob": _number(logprob), "bytes": list(raw)}


class CompletionShape:
    """``echoed`` is each choice's prompt text where the client asked for it, to stand before the output."""

    def __init__(
        self, *, id: str, model: str, created: int, names: Names, logprobs: bool, echoed: Sequence[str] | None
    ) -> None:
        self._head: JSON = {"id": f"cmpl-{id}", "object": "text_completion", "created": created, "model": model}
        self._names = names
        self._logprobs = logprobs
        self._echoed = echoed

    def _chunk(self, index: int, text: str, logprobs: JSON | None, finish: str | None) -> JSON:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {**self._head, "choices": [choice]}

    def _prefix(self, index: int) -> str:
        return self._echoed[index] if self._echoed is not None else ""

    def opening(self, index: int) -> list[JSON]:
        return [self._chunk(index, self._prefix(index), None, None)] if self._prefix(index) else []

    def chunk(self, index: int, piece: Piece) -> JSON | None:
        logprobs = self._lists(piece.tokens)
        if not piece.text and not logprobs and piece.finish is None:
            return None
        return self._chunk(index, piece.text, logprobs, _finish(piece))

    def usage_chunk(self, usage: Usage) -> JSON:
        return {**self._head, "choices": [], "usage": usage.json()}

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> JSON:
        out = [
            {
                "index": index,
                "text": self._prefix(index) + _text(pieces),
                "logprobs": self._lists(_tokens(pieces), always=True),
                "finish_reason": _last_finish(pieces),
            }
            for index, pieces in enumerate(choices)
        ]
        return {**self._head, "choices": out, "usage": usage.json()}

    def _lists(self, tokens: Sequence[PlacedToken], *, always: bool = False) -> JSON | None:
        if not self._logprobs or not (tokens or always):
            return None
        text = self._names.text
        return {
            "tokens": [text(t.sampled.token) for t in tokens],
            "token_logprobs": [_number(t.sampled.logprob) for t in tokens],
            "top_logprobs": [{text(top.token): _number(top.logprob) for top in t.sampled.top} for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }
