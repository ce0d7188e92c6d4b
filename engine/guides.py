"""Guided answers: which ids may come next so that an answer stays within its grammar. By llguidance.

What is allowed is a function of the guide and of the ids so far, and of nothing else: an attempt that is resumed, a
sequence that was preempted and another worker all come to the same by reading the same ids. Grammars that were compiled
and states of answers under way are kept, in bounded numbers, and made again where they are gone.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest
from moonpool.core.request import Guide, GuideKind, SamplingParams

GRAMMARS = 64  # compiled ones kept
STATES = 512  # of answers under way: more than a worker runs at once
WRITTEN = {"item_separator": ",[ ]?", "key_separator": ":[ ]?", "whitespace_flexible": False}  # no endless white space
REHEARSED = 8  # ids of an answer that a guide is tried with
_WORD = 4  # bytes of an id in a key

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Kept(Generic[K, V]):
    """The ``limit`` values used last. Safe from several threads."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._limit:
                self._values.popitem(last=False)

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def take(self, key: K) -> V | None:
        with self._lock:
            return self._values.pop(key, None)


@dataclass(slots=True)
class _State:
    """A matcher that has read some ids; ``over``: an end of sequence was one of them, and nothing but such may follow."""

    matcher: LLMatcher
    over: bool = False
    mask: NDArray[np.bool_] | None = None


class Guides:
    """Of one model's vocabulary. Safe from several threads."""

    def __init__(self, model_dir: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Nothing is loaded before the first guide comes."""
        self._file = model_dir / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._reading = threading.Lock()  # of states: a matcher serves one thread at a time
        self._grammars: _Kept[Guide, LLMatcher] = _Kept(GRAMMARS)
        self._states: _Kept[tuple[Guide, bytes], _State] = _Kept(STATES)

    def knows(self, guide: Guide) -> bool:
        """Whether it is compiled and at hand."""
        return self._grammars.get(guide) is not None

    def prepare(self, guide: Guide) -> None:
        """Compile it, unless it is at hand. InvalidRequest, without a field's name, where that cannot be done.

        Takes milliseconds, for large grammars up to a second, most of it without Python's lock.
        """
        self._grammar(guide)

    def judge(self, guide: Guide, *, compile_s: float, step_s: float) -> None:
        """As ``prepare``, before anybody else has to: InvalidRequest also where it costs too much.

        ``compile_s``, and ``step_s`` for each id of the beginning of an answer, are seconds of the processor.
        """
        if self.knows(guide):
            return
        self._vocabulary()
        begun = time.thread_time()
        grammar = self._compiled(guide)
        if (took := time.thread_time() - begun) > compile_s:
            raise InvalidRequest(f"it takes {took:.1f} s to compile, more than {compile_s:g} s; make it smaller")
        if (slow := self._rehearsed(grammar)) > step_s:
            raise InvalidRequest(
                f"it takes {slow * 1e3:.0f} ms an id to follow, more than {step_s * 1e3:g} ms; make it smaller"
            )
        self._grammars.put(guide, grammar)

    def _rehearsed(self, grammar: LLMatcher) -> float:
        """Seconds of the processor for an id, over the first few of some answer."""
        state, begun = _State(grammar.deep_copy()), time.thread_time()
        for _ in range(REHEARSED):
            ids = [int(i) for i in np.flatnonzero(self._mask(state)) if i not in self._eos]
            if not ids:
                break
            if not state.matcher.consume_token(ids[len(ids) * 7 // 11]):
                raise _lost(state.matcher)
        return (time.thread_time() - begun) / REHEARSED

    def warm(self, guide: Guide) -> None:
        """As ``prepare``, for a thread beside: what is wrong is told where the guide is used."""
        with contextlib.suppress(InvalidRequest):
            self.prepare(guide)

    def allowed_by(self, params: SamplingParams, outputs: Sequence[int]) -> NDArray[np.bool_] | None:
        """As ``allowed``; None where there is no guide."""
        return None if params.guide is None else self.allowed(params.guide, outputs)

    def allowed(self, guide: Guide, outputs: Sequence[int]) -> NDArray[np.bool_]:
        """bool [vocabulary]: the ids that may follow ``outputs``, one at least. Not to be written to.

        InvalidRequest where the guide is none, ``outputs`` have left it, or going on takes more than its limits.
        """
        raw = array.array("I", outputs).tobytes()
        key, grammar = (guide, _digest(raw)), self._grammar(guide)
        with self._reading:
            state = self._states.get(key)
            if state is None:
                state = self._next(guide, grammar, raw, outputs)
                self._states.put(key, state)
            if state.mask is None:
                state.mask = self._mask(state)
            return state.mask

    def _next(self, guide: Guide, grammar: LLMatcher, raw: bytes, outputs: Sequence[int]) -> _State:
        """The state of the ids but one, moved on by that one, or else all of them read anew."""
        state = self._states.take((guide, _digest(raw[:-_WORD]))) if outputs else None
        if state is None:
            state = _State(grammar.deep_copy())
            fresh = outputs
        else:
            fresh = outputs[-1:]
            state.mask = None
        for token in fresh:
            state.over = state.over or token in self._eos
            if not state.over and not state.matcher.consume_token(token):
                raise _lost(state.matcher)
        return state

    def _mask(self, state: _State) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if state.over:
            mask[self._eos] = True
            return mask
        bits = np.frombuffer(state.matcher.compute_bitmask(), dtype=np.uint8)
        if state.matcher.is_error():
            raise _lost(state.matcher)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(known)] = known
        mask[self._eos] = state.matcher.is_accepting()
        if not mask.any():
            raise InvalidRequest("the grammar leaves no id of this model's vocabulary; make it less narrow")
        return mask

    def _grammar(self, guide: Guide) -> LLMatcher:
        found = self._grammars.get(guide)
        if found is None:
            found = self._compiled(guide)
            self._grammars.put(guide, found)
        return found

    def _compiled(self, guide: Guide) -> LLMatcher:
        found = LLMatcher(self._vocabulary(), grammar_text(guide), log_level=0, limits=_limits())
        if found.is_error():
            raise _refused(found.get_error())
        self._mask(_State(found.deep_copy()))  # something may come first
        return found

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                if not self._eos:
                    raise InvalidRequest("this model has no end-of-sequence id, so a guided answer could not end; use another")
                try:
                    text = self._file.read_text(encoding="utf-8")
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos[0])
                except (OSError, ValueError) as e:
                    raise InvalidRequest(f"this model's tokenizer.json cannot be used for guided answers: {e}") from e
            return self._tokenizer


def grammar_text(guide: Guide) -> str:
    """As the library reads it. InvalidRequest where a schema is no JSON object."""
    match guide.kind:
        case GuideKind.JSON_OBJECT:
            return _schema_grammar('{"type":"object"}')
        case GuideKind.JSON_SCHEMA:
            return _schema_grammar(guide.text)
        case GuideKind.REGEX:
            return str(LLMatcher.grammar_from_regex(guide.text))
        case GuideKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(guide.text))


def written_as(schema: Mapping[str, object]) -> dict[str, object]:
    """``schema`` with how its JSON is to be spaced, whatever its client wishes, for use within a grammar."""
    return {**schema, "x-guidance": WRITTEN}


def _schema_grammar(text: str) -> str:
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("it is no JSON object")
        return str(LLMatcher.grammar_from_json_schema(json.dumps(written_as(schema))))
    except (ValueError, RecursionError) as e:
        raise InvalidRequest(f"not a JSON schema: {e}") from e


def _limits() -> LLParserLimits:
    """The library's own but for the sizes that one request may claim, and for objects of thousands of properties."""
    return LLParserLimits(max_items_in_row=20_000, max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False)


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


def _refused(error: str) -> InvalidRequest:
    return InvalidRequest(" ".join(error.split())[:400] or "the grammar cannot be compiled")


def _lost(matcher: LLMatcher) -> InvalidRequest:
    return InvalidRequest(f"the answer cannot go on within its grammar: {_refused(matcher.get_error()).message}")
