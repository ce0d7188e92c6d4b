"""What the parsers of tool calls share: where a call's JSON begins and ends, and what is content. Pure.

Where the pieces of text break makes no difference. A call begins to be told once its name and the opening brace of its
arguments are there; until then its text is held back, and is content after all where it turns out to be no call. From
then on arguments are told as they come, as the model wrote them: whether they are JSON is for their reader to check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

HELD_CHARS = 65_536  # of what may yet be a call
BLANK_CHARS = 256  # of white space before and after calls, which is dropped
MAX_TRIES = 16  # beginnings of calls in one answer that were none; what follows is content


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of call ``index`` of an answer: its first one has the name, all together have the arguments as JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """What a piece of text turned out to be. The order of content and calls in one answer has no meaning."""

    text: str = ""
    calls: tuple[CallPiece, ...] = ()


class ToolParser(Protocol):
    """One answer's text to content and calls."""

    @property
    def over(self) -> bool:
        """Nothing more is wanted of this answer."""

    def push(self, text: str) -> Said: ...

    def finish(self) -> Said:
        """The text has ended: what was held back."""


class Outbox:
    """Content and calls on their way out. White space at the start of an answer and after a call waits for text."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: list[CallPiece] = []
        self._blank = ""
        self._holding = True
        self.count = 0  # calls that have ended

    def say(self, text: str) -> None:
        if self._holding:
            text = self._blank + text
            if len(text) <= BLANK_CHARS and not text.strip():
                self._blank = text
                return
            self._blank, self._holding = "", False
        self._text.append(text)

    def begin(self, name: str) -> None:
        self._blank, self._holding = "", False
        self._calls.append(CallPiece(self.count, name))

    def argue(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallPiece(self.count, None, arguments))

    def end(self) -> None:
        self.count += 1
        self._holding = True

    def take(self) -> Said:
        said = Said("".join(self._text), tuple(self._calls))
        self._text.clear()
        self._calls.clear()
        return said

    def finish(self) -> None:
        """White space alone is an answer, too; after calls it is none."""
        if self._blank and not self.count:
            self._text.append(self._blank)
        self._blank = ""


class Brackets:
    """Where the JSON value that begins with a bracket ends, in pieces of text."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Index behind the bracket that closes it; None: not in ``text``."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                self._quoted = char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


class Verdict(Enum):
    MORE = auto()  # text is wanted
    DONE = auto()  # a call has ended
    NONE = auto()  # it is no call


class _Stage(Enum):
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()  # of the object around name and arguments
    SKIPPED = auto()  # other fields of that object


_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}("(?:[^"\\]|\\.){0,256}")\s{0,64},'
    r'\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)',
    re.DOTALL,
)


class CallReader:
    """One call as a JSON object with a name and arguments (or parameters), in any order; told to ``out``.

    A call names one of ``names``. Where the name does not come first, or arguments are a string with JSON in it, the
    whole object is held back, up to ``HELD_CHARS``.
    """

    def __init__(self, names: Collection[str], out: Outbox) -> None:
        self._names = names
        self._out = out
        self._stage = _Stage.HEAD
        self._held = ""
        self._around = Brackets()
        self._inside = Brackets()
        self._skipped = 0

    def push(self, text: str) -> tuple[Verdict, str]:
        """What is known now, and the text that is not part of the call: all of it so far where there is none."""
        verdict, rest = Verdict.MORE, text
        while rest and verdict is Verdict.MORE:
            verdict, rest = self._step(rest)
        return verdict, rest

    def finish(self) -> tuple[Verdict, str]:
        """The text has ended within the call."""
        if self._stage is not _Stage.HEAD:
            return Verdict.DONE, ""
        return Verdict.NONE, self._held

    def _step(self, text: str) -> tuple[Verdict, str]:
        match self._stage:
            case _Stage.HEAD:
                return self._head(text)
            case _Stage.ARGUMENTS:
                return self._arguments(text)
            case _Stage.TAIL:
                return self._tail(text)
            case _Stage.SKIPPED:
                return self._skip(text)

    def _head(self, text: str) -> tuple[Verdict, str]:
        before = len(self._held)
        end = self._around.end(text)
        self._held += text
        found = _HEAD.match(self._held, 0, HELD_CHARS)
        if found:
            name = _loaded(found[1])
            if name not in self._names:
                return Verdict.NONE, self._held
            self._out.begin(name)
            self._stage = _Stage.ARGUMENTS
            return Verdict.MORE, self._held[found.end() :]
        if self._held.lstrip()[:1] not in ("", "{"):
            return Verdict.NONE, self._held
        if end is not None and before + end <= HELD_CHARS:
            return self._whole(before + end)
        if len(self._held) > HELD_CHARS:
            return Verdict.NONE, self._held
        return Verdict.MORE, ""

    def _whole(self, end: int) -> tuple[Verdict, str]:
        """The object is closed, and did not begin with the name."""
        value = _loaded(self._held[:end])
        arguments = _arguments(value) if isinstance(value, dict) else None
        if arguments is None or value["name"] not in self._names:
            return Verdict.NONE, self._held
        self._out.begin(value["name"])
        self._out.argue(arguments)
        return Verdict.DONE, self._held[end:]

    def _arguments(self, text: str) -> tuple[Verdict, str]:
        end = self._inside.end(text)
        self._out.argue(text if end is None else text[:end])
        if end is None:
            return Verdict.MORE, ""
        self._stage = _Stage.TAIL
        return Verdict.MORE, text[end:]

    def _tail(self, text: str) -> tuple[Verdict, str]:
        text = text.lstrip()
        if text.startswith(","):
            self._stage, self._around = _Stage.SKIPPED, Brackets(1)
            return Verdict.MORE, text[1:]
        if text.startswith("}"):
            return Verdict.DONE, text[1:]
        return (Verdict.DONE if text else Verdict.MORE), text

    def _skip(self, text: str) -> tuple[Verdict, str]:
        room = HELD_CHARS - self._skipped
        end = self._around.end(text[:room])
        if end is not None:
            return Verdict.DONE, text[end:]
        self._skipped += len(text[:room])
        return (Verdict.DONE if len(text) > room else Verdict.MORE), text[room:]


def _loaded(text: str) -> Any:
    """The JSON value; None where ``text`` is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _arguments(call: dict[str, Any]) -> str | None:
    """JSON text of the arguments; None where ``call`` is not one."""
    if not isinstance(call.get("name"), str):
        return None
    value = call.get("arguments", call.get("parameters"))
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value if isinstance(_loaded(value), dict) else None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
