"""The model's tokenizer as the gateway uses it: prompts to ids, ids to bytes.

Completion prompts are raw: special-token text in them is parsed, and what the tokenizer's post-processor adds is added,
except that a begin-of-sequence id already written by the client is not doubled. In a chat only the template may write
control tokens: their text in a client's message is encoded as ordinary text, so a message cannot end its own turn.
The library marks such text with U+F0000 and U+F0001 while it renders; these two private-use characters are dropped
from messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from moonpool.cluster.gateway.known_texts import KnownTexts, cuts_cleanly
from moonpool.cluster.gateway.tool_calls import rendering
from moonpool.cluster.gateway.tool_calls.families import FAMILIES, Family, family_of, knows_tools
from moonpool.core.errors import ConfigError, InvalidRequest, UnsupportedModel

SPACE_MARK = "▁"  # U+2581, how SentencePiece writes a space


class Tokenizer:
    """Not safe for use from two threads at once: the library flips encoding modes in place."""

    def __init__(self, library: Any, *, tool_parser: str = "auto") -> None:
        """``library`` is a transformers tokenizer with a ``tokenizers`` back end; ``tool_parser`` is ``model.tool_parser``."""
        self._library = library
        self._tool_parser = tool_parser
        backend: Backend = library.backend_tokenizer
        self.bos_id: int | None = library.bos_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.tokens = TokenTable(backend)
        if cuts_cleanly(backend) and not library.split_special_tokens:
            library.encode = KnownTexts(backend, library.encode, self.tokens.name_bytes).encode  # chats go through it, too

    @classmethod
    def load(cls, model_dir: Path, *, tool_parser: str = "auto") -> Tokenizer:
        try:
            library = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        except (OSError, ValueError) as e:
            raise ConfigError(
                f"model.path: no usable tokenizer in {model_dir}: {e}; the directory needs tokenizer.json", param="model.path"
            ) from e
        if getattr(library, "backend_tokenizer", None) is None:
            raise UnsupportedModel(
                f"tokenizer: {type(library).__name__} has no fast form; convert it to tokenizer.json", param="model.path"
            )
        return cls(library, tool_parser=tool_parser)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a raw completion prompt; with ``special`` what the tokenizer adds by itself, too."""
        ids: list[int] = self._library.encode(text, add_special_tokens=special)
        if self.bos_id is not None and ids[:2] == [self.bos_id] * 2 and not self._written_twice(text):
            del ids[0]
        return ids

    def _written_twice(self, text: str) -> bool:
        return text.startswith(str(self._library.bos_token) * 2)

    @property
    def can_chat(self) -> bool:
        return bool(self._library.chat_template)

    @cached_property
    def family(self) -> Family | None:
        """How the model writes tool calls; None: not known, or not wanted."""
        if self._tool_parser == "auto":
            return family_of(self._template([{}])) if self.can_chat else None
        return FAMILIES.get(self._tool_parser)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Of the special tokens, by their text."""
        return {token.content: id for id, token in self._library.added_tokens_decoder.items() if token.special}

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, may_call: bool = True
    ) -> list[int]:
        """Ids of the rendered conversation, ready for the assistant's turn. InvalidRequest where the template refuses.

        A template that has no place for tools gets them as text, unless none of them may be called.
        """
        if not self.can_chat:
            raise InvalidRequest(
                "messages: this model has no chat template; use /v1/completions, or add chat_template.jinja to the model",
                param="messages",
            )
        seen = rendering.with_names(messages)
        if not knows_tools(self._template(tools)):
            seen, tools = rendering.in_text(seen, tools if may_call else ()), ()
        elif self.family is not None and self.family.short_ids:
            seen = rendering.with_short_ids(seen)
        try:
            ids: list[int] = self._library.apply_chat_template(
                rendering.with_names_as_text(seen, self._control),
                tools=rendering.with_names_as_text(tools, self._control) or None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                sanitize_control_tokens=True,
            )
        except Exception as e:
            raise InvalidRequest(f"messages: the model's chat template refuses them: {e}", param="messages") from e
        return ids

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The one that ``tools`` are rendered with: some models have several."""
        try:
            return str(self._library.get_chat_template(tools=list(tools) or None))
        except ValueError as e:
            raise InvalidRequest(f"messages: the model has no chat template for them: {e}", param="messages") from e

    @cached_property
    def _control(self) -> re.Pattern[str]:
        names = {token.content for token in self._library.added_tokens_decoder.values() if not token.content.isspace()}
        return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)")


class TokenTable:
    """What each id stands for, in bytes. Filled as ids are met; at most one entry per id of the vocabulary."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._byte_level = _is_byte_level(backend)
        self._text: dict[int, bytes] = {}
        self._names: dict[int, bytes] = {}

    def text_bytes(self, token: int) -> bytes:
        """The id's part of the output's UTF-8; empty for special tokens and ids without a token."""
        raw = self._text.get(token)
        if raw is None:
            added = self._added.get(token)
            raw = self._text[token] = b"" if added is not None and added.special else self.name_bytes(token)
        return raw

    def name_bytes(self, token: int) -> bytes:
        """As ``text_bytes``, special tokens by their name: what log-probabilities show."""
        raw = self._names.get(token)
        if raw is None:
            added = self._added.get(token)
            name = added.content if added is not None else self._backend.id_to_token(token)
            raw = self._names[token] = self._to_bytes(name or "")
        return raw

    def _to_bytes(self, name: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in name)
            except KeyError:
                return name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes([int(name[3:5], 16)])
            except ValueError:
                return name.encode()
        return name.replace(SPACE_MARK, " ").encode()


def _is_byte_level(backend: Backend) -> bool:
    """Byte-level (GPT-2) or SentencePiece decoding; UnsupportedModel names anything else."""
    decoder: dict[str, Any] = {"type": None} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return True
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {"Replace", "Metaspace"}:
        return False
    raise UnsupportedModel(
        f"tokenizer: decoder {sorted(map(str, kinds))} is not known; byte-level and SentencePiece decoders are",
        param="model.path",
    )


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
