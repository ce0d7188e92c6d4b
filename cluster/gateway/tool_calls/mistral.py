"""Calls as Mistral's models write them: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``. Pure.

Newer ones write ``[TOOL_CALLS]name[ARGS]{...}`` for each call; both are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

from moonpool.cluster.gateway.tool_calls.marked import MarkedParser
from moonpool.cluster.gateway.tool_calls.reading import Brackets, CallReader, Verdict

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = re.compile(r"\s{0,64}([\w.-]{1,128})(?:\[ARGS\])?\s{0,64}(?=\{)", re.ASCII)
_MAY_BE_NAMED = re.compile(r"\s{0,64}[\w.-]{0,128}(?:\[A?R?G?S?|\[ARGS\])?\s{0,64}", re.ASCII)


class _Stage(Enum):
    TEXT = auto()
    OPENED = auto()  # the mark was there
    CALL = auto()  # an item of the list
    BETWEEN = auto()  # a comma or the end of the list is due
    ARGUMENTS = auto()  # of a call whose name stood before them


class MistralParser(MarkedParser):
    """As ``MarkedParser``."""

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        super().__init__(OPEN, names, parallel=parallel)
        self._inside = Brackets()
        self._stage = _Stage.TEXT
        self._lead = ""  # what stands before the brace that may begin a call

    @property
    def _in_call(self) -> bool:
        return self._stage is _Stage.CALL

    def _unsaid(self) -> str:
        return OPEN + self._held if self._stage is _Stage.OPENED else self._held

    def _step(self, text: str) -> str:
        match self._stage:
            case _Stage.TEXT:
                return self._text(text)
            case _Stage.OPENED:
                return self._opened(text)
            case _Stage.CALL:
                return self._judge(*self._reader.push(text))
            case _Stage.BETWEEN:
                return self._between(text)
            case _Stage.ARGUMENTS:
                return self._arguments(text)

    def _text(self, text: str) -> str:
        behind = self._marked(text)
        if behind is None:
            return ""
        self._stage = _Stage.OPENED
        return behind

    def _opened(self, text: str) -> str:
        text, self._held = self._held + text, ""
        bare = text.lstrip()
        if bare.startswith("["):
            return self._begin(OPEN + text[: len(text) - len(bare) + 1], bare[1:])
        found = _NAMED.match(text)
        if found and found[1] in self._names:
            self._out.begin(found[1])
            self._stage, self._inside = _Stage.ARGUMENTS, Brackets()
            return text[found.end() :]
        if not found and _MAY_BE_NAMED.fullmatch(text):
            self._held = text
            return ""
        return self._none(OPEN, text)

    def _begin(self, lead: str, rest: str) -> str:
        self._stage, self._lead, self._reader = _Stage.CALL, lead, CallReader(self._names, self._out)
        return rest

    def _none(self, lead: str, rest: str) -> str:
        self._tries += 1
        self._out.say(lead)
        self._stage = _Stage.TEXT
        return rest

    def _judge(self, verdict: Verdict, rest: str) -> str:
        if verdict is Verdict.NONE:
            return self._none(self._lead, rest)
        if verdict is Verdict.DONE:
            self._end(_Stage.BETWEEN)
        return rest

    def _end(self, stage: _Stage) -> None:
        self._out.end()
        self._stage, self.over = stage, not self._parallel

    def _between(self, text: str) -> str:
        text = text.lstrip()
        if text.startswith(","):
            return self._begin(",", text[1:])
        if text:
            self._stage = _Stage.TEXT
        return text.removeprefix("]")

    def _arguments(self, text: str) -> str:
        end = self._inside.end(text)
        self._out.argue(text if end is None else text[:end])
        if end is None:
            return ""
        self._end(_Stage.TEXT)
        return text[end:]
