"""Answers in OpenAI's shapes: plain dictionaries from pieces of text. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moonpool.cluster.gateway.choice import Piece, PlacedToken
from moonpool.cluster.gateway.scored_prompt import EchoedPrompt, ScoredPrompt, as_vllm
from moonpool.cluster.gateway.tool_calls.reading import CallPiece
from moonpool.core.request import FinishReason, Sampled

JSON = dict[str, Any]
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI says this


@dataclass(frozen=True, slots=True)
class Usage:
    """``prompt`` is the true length; ``cached`` the prompt tokens not computed anew, wherever their KV came from."""

    prompt: int
    completion: int
    cached: int

    @classmethod
    def total(cls, parts: Sequence[Usage]) -> Usage:
        return cls(sum(p.prompt for p in parts), sum(p.completion for p in parts), sum(p.cached for p in parts))

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

    def chunks(self, index: int, piece: Piece) -> list[JSON]:
        """The piece as chunks; none where it would say nothing."""

    def usage_chunk(self, usage: Usage) -> JSON: ...

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> JSON:
        """The answer in one object: the pieces of every choice, in the order of their prompts."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer says, and what the client asked to see.

    ``name_bytes(id)`` is the id's text, special tokens by their name. ``prompt_ids`` are the prompts of the choices
    where the client asked for ids, else None. ``logprobs``: of the output.
    """

    id: str
    model: str
    created: int
    name_bytes: Callable[[int], bytes]
    logprobs: bool = False
    prompt_ids: Sequence[Sequence[int]] | None = None
    scored: Sequence[ScoredPrompt] = ()  # of each choice, where ``prompt_logprobs`` says how many alternatives are shown
    prompt_logprobs: int | None = None

    def text(self, token: int) -> str:
        """Bytes that are no whole characters are shown as OpenAI shows them, so different ids keep different names."""
        raw = self.name_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def ids(self, pieces: Sequence[Piece]) -> JSON:
        """``token_ids`` of a chunk's or choice's pieces, where asked for."""
        if self.prompt_ids is None:
            return {}
        return {"token_ids": [piece.id for piece in pieces if piece.id is not None]}

    def all_ids(self, index: int, pieces: Sequence[Piece]) -> JSON:
        """As ``ids``, and those of the prompt."""
        if self.prompt_ids is None:
            return {}
        return {"prompt_token_ids": list(self.prompt_ids[index]), **self.ids(pieces)}

    def of_prompt(self, index: int) -> JSON:
        """What vLLM tells of a prompt, where asked for."""
        if self.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": as_vllm(self.scored[index], self.prompt_logprobs, self.text, _number)}

    def says_nothing(self, piece: Piece, logprobs: JSON | None) -> bool:
        shown_id = self.prompt_ids is not None and piece.id is not None
        return not piece.text and not logprobs and piece.finish is None and not shown_id

    def call_id(self, index: int, call: int) -> str:
        """Of call ``call`` of choice ``index``; the same whenever it is asked for."""
        return f"call_{hashlib.blake2b(f'{self.id} {index} {call}'.encode(), digest_size=12).hexdigest()}"


def _finish(piece: Piece) -> str | None:
    if piece.finish is FinishReason.STOP and piece.called:
        return "tool_calls"
    return piece.finish.value if piece.finish is not None else None


def _number(logprob: float | None) -> float:
    return LOWEST_LOGPROB if logprob is None else max(logprob, LOWEST_LOGPROB)


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Sequence[Piece]) -> list[PlacedToken]:
    return [token for piece in pieces for token in piece.tokens]


def _last_finish(pieces: Sequence[Piece]) -> str:
    return next((name for p in reversed(pieces) if (name := _finish(p)) is not None), FinishReason.LENGTH.value)


class ChatShape:
    def __init__(self, head: Head) -> None:
        self._head = head

    def _object(self, kind: str, choices: list[JSON]) -> JSON:
        head = self._head
        return {
            "id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model, "choices": choices,
        }  # fmt: skip

    def _chunk(self, choices: list[JSON]) -> JSON:
        return self._object("chat.completion.chunk", choices)

    def opening(self, index: int) -> list[JSON]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def chunks(self, index: int, piece: Piece) -> list[JSON]:
        """Every part of a call is a chunk of its own; the last chunk is what it would be without calls."""
        out = [self._chunk([self._choice(index, {"tool_calls": [self._delta(index, call)]})]) for call in piece.calls]
        logprobs = self._content(piece.tokens)
        if not self._head.says_nothing(piece, logprobs):
            choice = self._choice(index, {"content": piece.text} if piece.text else {}, logprobs, _finish(piece))
            out.append(self._chunk([choice | self._head.ids([piece])]))
        return out

    @staticmethod
    def _choice(index: int, delta: JSON, logprobs: JSON | None = None, finish: str | None = None) -> JSON:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _delta(self, index: int, call: CallPiece) -> JSON:
        """The first part of a call has its id, its type and its name, the others only more of its arguments."""
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": self._head.call_id(index, call.index), "type": "function", "function": function}

    def _message(self, index: int, pieces: Sequence[Piece]) -> JSON:
        calls: list[JSON] = []
        for part in (call for piece in pieces for call in piece.calls):
            if part.name is not None:
                calls.append(self._delta(index, part))
                del calls[-1]["index"]
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        text = _text(pieces)
        message: JSON = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def usage_chunk(self, usage: Usage) -> JSON:
        return {**self._chunk([]), "usage": usage.json()}

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> JSON:
        out = [
            {
                "index": index,
                "message": self._message(index, pieces),
                "logprobs": self._content(_tokens(pieces), always=True),
                "finish_reason": _last_finish(pieces),
                **self._head.all_ids(index, pieces),
            }
            for index, pieces in enumerate(choices)
        ]
        return {**self._object("chat.completion", out), **self._head.of_prompt(0), "usage": usage.json()}

    def _content(self, tokens: Sequence[PlacedToken], *, always: bool = False) -> JSON | None:
        if not self._head.logprobs or not (tokens or always):
            return None
        return {"content": [self._entry(t.sampled) for t in tokens], "refusal": None}

    def _entry(self, sampled: Sampled) -> JSON:
        top = [self._one(t.token, t.logprob) for t in sampled.top]
        return {**self._one(sampled.token, sampled.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float | None) -> JSON:
        return {"token": self._head.text(token), "logprob": _number(logprob), "bytes": list(self._head.name_bytes(token))}


class CompletionShape:
    """``echoed`` is each choice's prompt where the client asked for it, to stand before the output."""

    def __init__(self, head: Head, *, echoed: Sequence[EchoedPrompt] | None) -> None:
        self._head = head
        self._echoed = echoed

    def _object(self, choices: list[JSON]) -> JSON:
        head = self._head
        return {
            "id": f"cmpl-{head.id}", "object": "text_completion", "created": head.created, "model": head.model,
            "choices": choices,
        }  # fmt: skip

    def _prefix(self, index: int) -> str:
        return self._echoed[index].text if self._echoed is not None else ""

    def opening(self, index: int) -> list[JSON]:
        prefix, logprobs = self._prefix(index), self._of_prompt(index)
        if not prefix and logprobs is None:
            return []
        return [self._object([{"index": index, "text": prefix, "logprobs": logprobs, "finish_reason": None}])]

    def chunks(self, index: int, piece: Piece) -> list[JSON]:
        logprobs = self._lists(index, piece.tokens)
        if self._head.says_nothing(piece, logprobs):
            return []
        choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": _finish(piece)}
        return [self._object([choice | self._head.ids([piece])])]

    def usage_chunk(self, usage: Usage) -> JSON:
        return {**self._object([]), "usage": usage.json()}

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> JSON:
        out = [
            {
                "index": index,
                "text": self._prefix(index) + _text(pieces),
                "logprobs": self._all_lists(index, _tokens(pieces)),
                "finish_reason": _last_finish(pieces),
                **self._head.all_ids(index, pieces),
                **self._head.of_prompt(index),
            }
            for index, pieces in enumerate(choices)
        ]
        return {**self._object(out), "usage": usage.json()}

    def _all_lists(self, index: int, tokens: Sequence[PlacedToken]) -> JSON | None:
        """Of the echoed prompt, and of the output."""
        mine, before = self._lists(index, tokens, always=True), self._of_prompt(index)
        if mine is None or before is None:
            return mine
        return {name: before[name] + mine[name] for name in mine}

    def _of_prompt(self, index: int) -> JSON | None:
        if not self._head.logprobs or self._echoed is None or (scored := self._echoed[index].scored) is None:
            return None
        text, entries = self._head.text, list(scored.entries(self._echoed[index].width))
        return {
            "tokens": [text(token) for token in scored.ids],
            "token_logprobs": [None if one is None else _number(one.logprob) for one in entries],
            "top_logprobs": [
                None if one is None else {text(top.token): _number(top.logprob) for top in one.top} for one in entries
            ],
            "text_offset": list(self._echoed[index].offsets),
        }

    def _lists(self, index: int, tokens: Sequence[PlacedToken], *, always: bool = False) -> JSON | None:
        """Offsets count from the start of the choice's text, an echoed prompt included."""
        if not self._head.logprobs or not (tokens or always):
            return None
        text, start = self._head.text, len(self._prefix(index))
        return {
            "tokens": [text(t.sampled.token) for t in tokens],
            "token_logprobs": [_number(t.sampled.logprob) for t in tokens],
            "top_logprobs": [{text(top.token): _number(top.logprob) for top in t.sampled.top} for t in tokens],
            "text_offset": [start + t.offset for t in tokens],
        }
