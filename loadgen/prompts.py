"""Prompt content for block ids: equal ids give equal tokens, different ids different ones, on every machine and run.

Content is a sequence of symbols of an *alphabet*: token ids, or words that are one token each. The first symbols of a
block spell its id in base ``size``, least significant digit first, each digit shifted by noise made from the digits
before it (so the spelling stays one-to-one and yet looks like the rest); the others are noise keyed by id. The noise is
splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014). Two ids below
``size ** n`` therefore never share their first n symbols: that blocks are distinct is not left to chance.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from moonpool.core.errors import ConfigError
from moonpool.loadgen.plan import PlannedSend

# Ids that exist in nearly every vocabulary and are neither control tokens nor single bytes.
DEFAULT_TOKEN_RANGE = (1_000, 32_000)
_LEAST_SYMBOLS = 1_000
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_CACHED_BLOCKS = 4_096
_WORD = re.compile(r" [A-Za-z]{2,}\Z")


def block_symbols(hash_id: int, count: int, size: int, salt: int = 0) -> NDArray[np.int64]:
    """The first ``count`` symbols of a block, each in [0, size). ``hash_id`` below 2**63; a shorter block is a prefix."""
    salted = (salt * _GOLDEN + size) & _MASK
    key = np.uint64(_mix(np.asarray([hash_id, salted], dtype=np.uint64)).sum())
    symbols = (_mix(key + _steps(count)) % np.uint64(size)).astype(np.int64)
    spelled = min(count, _digits(size))
    powers = np.asarray([size**p for p in range(spelled)], dtype=np.uint64)
    lower = np.uint64(hash_id) % powers  # the digits below p, as one number
    digits = np.uint64(hash_id) // powers % np.uint64(size)
    shifts = _mix(_mix(lower + np.uint64(salted)) + _steps(spelled)) % np.uint64(size)
    symbols[:spelled] = (digits + shifts) % np.uint64(size)
    return symbols


def _steps(count: int) -> NDArray[np.uint64]:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)  # wraps, as it should


def _digits(size: int) -> int:
    """Symbols that spell every id below 2**63; the largest power used, ``size ** (digits - 1)``, fits 64 bits."""
    count, reach = 1, size
    while reach < 1 << 63:
        count, reach = count + 1, reach * size
    return count


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: one-to-one on 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Symbols as they stand in a JSON body: ``opening + separator.join(pieces) + closing``.

    ``overhead`` is the number of tokens a tokenizer adds on its own (a begin-of-text id): prompts are that much shorter.
    """

    pieces: Sequence[bytes]
    separator: bytes
    opening: bytes
    closing: bytes
    overhead: int = 0


def token_alphabet(token_range: tuple[int, int] = DEFAULT_TOKEN_RANGE) -> Alphabet:
    """Prompts as token ids of [first, end): exact length whatever the tokenizer."""
    first, end = token_range
    if first < 0 or end - first < _LEAST_SYMBOLS:
        raise ConfigError(
            f"token_range: {first}..{end} holds fewer than {_LEAST_SYMBOLS} ids; give ordinary tokens, such as 1000..32000",
            param="token_range",
        )
    return Alphabet([b"%d" % i for i in range(first, end)], b",", b"[", b"]")


def word_alphabet(model_dir: Path) -> Alphabet:
    """Prompts as text: words with a leading space that the tokenizer of ``model_dir`` keeps as one token, alone and joined."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"tokenizer: {path} is missing; text prompts need the model's tokenizer.json", param="tokenizer")
    tokenizer = Tokenizer.from_file(str(path))
    words = _single_token_words(tokenizer)
    if len(words) < _LEAST_SYMBOLS:
        raise ConfigError(
            f"tokenizer: {path} has {len(words)} words that stay one token, {_LEAST_SYMBOLS} needed; send token ids instead",
            param="tokenizer",
        )
    order = np.argsort(block_symbols(1, len(words), 1 << 31), kind="stable")
    names = list(words)
    shuffled = [names[i] for i in order]
    joined = tokenizer.encode("".join(shuffled), add_special_tokens=False).ids
    if joined != [words[w] for w in shuffled]:
        raise ConfigError(
            f"tokenizer: joined words of {path} do not stay one token each; send token ids instead", param="tokenizer"
        )
    overhead = len(tokenizer.encode(names[0]).ids) - 1
    return Alphabet([w.encode() for w in names], b"", b'"', b'"', overhead)


def _single_token_words(tokenizer: Tokenizer) -> dict[str, int]:
    spaced = {piece.replace("Ġ", " ").replace("▁", " "): i for piece, i in tokenizer.get_vocab().items()}
    candidates = sorted(w for w in spaced if _WORD.match(w))  # letters only: nothing to escape in JSON
    encoded = tokenizer.encode_batch(candidates, add_special_tokens=False)
    return {w: spaced[w] for w, e in zip(candidates, encoded, strict=True) if e.ids == [spaced[w]]}


class PromptMaker:
    """Prompts of planned sends as JSON values. Another ``salt`` gives another prompt for the same ids.

    ``fresh_loops`` makes every pass over the trace a new set of prompts; otherwise a second pass finds the first one's cache.
    """

    def __init__(self, alphabet: Alphabet, *, salt: int = 0, fresh_loops: bool = False) -> None:
        self._alphabet = alphabet
        self._salt = salt
        self._fresh_loops = fresh_loops
        self._whole: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()  # LRU of whole blocks, bounded

    def json_prompt(self, send: PlannedSend) -> bytes:
        """The value of ``prompt``: exactly ``send.input_tokens`` tokens to the server."""
        salt = self._salt + (send.loop << 32 if self._fresh_loops else 0)
        left = max(send.input_tokens - self._alphabet.overhead, 1)
        parts = []
        for hash_id in send.hash_ids:
            count = min(left, send.block_tokens)
            if count <= 0:
                break
            parts.append(self._block(hash_id, count, salt, send.block_tokens))
            left -= count
        return self._alphabet.opening + self._alphabet.separator.join(parts) + self._alphabet.closing

    def _block(self, hash_id: int, count: int, salt: int, whole: int) -> bytes:
        if count < whole:
            return self._render(hash_id, count, salt)
        key = (hash_id, salt, whole)
        found = self._whole.get(key)
        if found is None:
            found = self._whole[key] = self._render(hash_id, count, salt)
            if len(self._whole) > _CACHED_BLOCKS:
                self._whole.popitem(last=False)
        else:
            self._whole.move_to_end(key)
        return found

    def _render(self, hash_id: int, count: int, salt: int) -> bytes:
        pieces = self._alphabet.pieces
        return self._alphabet.separator.join([pieces[s] for s in block_symbols(hash_id, count, len(pieces), salt).tolist()])
