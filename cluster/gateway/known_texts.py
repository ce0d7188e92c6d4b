"""Texts tokenised before: what a conversation's next turn begins with is looked up, and only what is new is tokenised.

A text is cut where a word of it (what the tokenizer's regular expression splits off before any merging) begins. What comes
from there on has the same ids by itself as within the text, for the tokenizers that ``cuts_cleanly`` knows: they look at
nothing to the left of a word. To its right they look as far as a run of like characters goes, however long it is: a line's
end, spaces and a line's end are one word, spaces before anything else are one of their own.

A stride of ``STRIDE_BYTES`` is known by its bytes. What is remembered of it ends where the last word begins that has
``MARGIN_BYTES`` and ``WORDS_SEEN`` whole words after it in the stride, so that whatever follows the stride changes none of
these ids.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

STRIDE_BYTES = 2_048
MARGIN_BYTES = 256  # more than any added token has
WORDS_SEEN = 2  # the rest of a run of like characters, and what ended the run
MOST_STRIDES = 4_096  # about 20 MB, 2 M tokens
_LOOKS_LEFT = re.compile(r"\(\?<[=!]|\\[bBAGzZK]|\$|(?<!\[)\^")


class Encode(Protocol):
    """As transformers' tokenizers have it."""

    def __call__(self, text: str, add_special_tokens: bool = True, **others: Any) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Known:
    ids: array[int]
    length: int  # bytes of the stride that they stand for


class KnownTexts:
    """One thread. The strides used longest ago are forgotten first."""

    def __init__(self, backend: Backend, plain: Encode, bytes_of: Callable[[int], bytes], most: int = MOST_STRIDES) -> None:
        """``plain`` encodes without any memory; ``bytes_of(id)`` is the id's text. ``backend`` must cut cleanly."""
        self._backend, self._plain, self._bytes_of, self._most = backend, plain, bytes_of, most
        self._known: dict[bytes, _Known] = {}
        self._before, self._after = _added(plain)

    def __len__(self) -> int:
        return len(self._known)

    def encode(self, text: str, add_special_tokens: bool = True, **others: Any) -> list[int]:
        """As ``plain``, which is asked where ``others`` ask for something else than usual."""
        raw = _utf8(text)
        if others or raw is None or len(raw) < STRIDE_BYTES:
            return self._plain(text, add_special_tokens=add_special_tokens, **others)
        ids = self._ids(raw)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def _ids(self, raw: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while (found := self._known.pop(name := raw[at : at + STRIDE_BYTES], None)) is not None:
            self._known[name] = found  # used last now
            ids.extend(found.ids)
            at += found.length
        self._backend.encode_special_tokens = False  # the library flips it
        rest = self._backend.encode(raw[at:].decode(), add_special_tokens=False)
        self._remember(raw[at:], rest)
        return ids + rest.ids

    def _remember(self, raw: bytes, encoding: Encoding) -> None:
        if len(raw) < STRIDE_BYTES:
            return
        ids, words = encoding.ids, encoding.word_ids
        parts = [self._bytes_of(token) for token in ids]
        if b"".join(parts) != raw:  # an id stands for other bytes than its own: where words begin is not known
            return
        starts, first = _word_starts(parts, words), 0
        while True:
            begin, first_id = starts[first]
            end = begin + STRIDE_BYTES
            seen = bisect_left(starts, (end, 0)) - 1 - WORDS_SEEN  # the last word with as many whole ones after it
            last = min(bisect_right(starts, (end - MARGIN_BYTES, len(ids))) - 1, seen)
            if last <= first or end > len(raw):
                break  # at a word as long as a stride, or after the last whole one
            cut, last_id = starts[last]
            self._known[raw[begin:end]] = _Known(array("I", ids[first_id:last_id]), cut - begin)
            first = last
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]


def _word_starts(parts: Sequence[bytes], words: Sequence[int | None]) -> list[tuple[int, int]]:
    """Of every word: bytes before it, and ids. ``parts`` and ``words``: bytes of each id, and the word that it is of."""
    starts, at = [], 0
    for index, part in enumerate(parts):
        if not index or words[index] != words[index - 1]:
            starts.append((at, index))
        at += len(part)
    return starts


def cuts_cleanly(backend: Backend) -> bool:
    """Whether every text may be cut where a word begins. False for what is not known to be so."""
    model = backend.model
    if backend.normalizer is not None or not isinstance(model, BPE) or model.dropout or backend.pre_tokenizer is None:
        return False
    added = backend.get_added_tokens_decoder().values()
    if any(one.lstrip or one.rstrip or one.single_word or len(one.content.encode()) > MARGIN_BYTES // 2 for one in added):
        return False
    state: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    kinds = [_kind(part) for part in parts]
    return None not in kinds and kinds.count("regex") == 1 and "digits" not in kinds[kinds.index("regex") :]


def _kind(part: dict[str, Any]) -> str | None:
    """regex: splits by an expression that only looks ahead; digits, bytes: by each character alone. None: not known."""
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(own)}:
            return "regex" if own else "bytes"
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return None if _LOOKS_LEFT.search(pattern) else "regex"
        case {"type": "Digits"}:
            return "digits"
    return None


def _added(plain: Encode) -> tuple[list[int], list[int]]:
    """What the tokenizer adds before and after every text."""
    bare, whole = plain("a", add_special_tokens=False), plain("a", add_special_tokens=True)
    first = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:first], whole[first + len(bare) :]


def _utf8(text: str) -> bytes | None:
    """None: JSON may write half of a surrogate pair, which has no bytes."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None
