"""Calls as Llama 3 writes them: an answer that is ``{"name": ..., "parameters": {...}}``, or several with ``;`` between them.

``<|python_tag|>`` may stand before them, also after some text. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from moonpool.cluster.gateway.tool_calls.marked import MarkedParser
from moonpool.cluster.gateway.tool_calls.reading import BLANK_CHARS, CallReader, Verdict

OPEN, BETWEEN = "<|python_tag|>", ";"


class _Stage(Enum):
    DUE = auto()  # a call, where a brace comes next: at the start of the answer, and after a call
    TEXT = auto()
    CALL = auto()


class Llama3Parser(MarkedParser):
    """As ``MarkedParser``."""

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        super().__init__(OPEN, names, parallel=parallel)
        self._stage = _Stage.DUE
        self._lead = ""  # what stands before the brace that may begin a call

    @property
    def _in_call(self) -> bool:
        return self._stage is _Stage.CALL

    def _step(self, text: str) -> str:
        if self._stage is _Stage.DUE:
            return self._due(text)
        if self._stage is _Stage.TEXT:
            return self._text(text)
        return self._judge(*self._reader.push(text))

    def _due(self, text: str) -> str:
        text, self._held = self._held + text, ""
        bare = text.lstrip()
        if self._out.count and bare.startswith(BETWEEN):
            bare = bare[len(BETWEEN) :].lstrip()
        if bare.startswith("{"):
            return self._begin(text[: len(text) - len(bare)], bare)
        if not bare and len(text) <= BLANK_CHARS:
            self._held = text
            return ""
        self._stage = _Stage.TEXT
        return text

    def _begin(self, lead: str, rest: str) -> str:
        self._stage, self._lead, self._reader = _Stage.CALL, lead, CallReader(self._names, self._out)
        return rest

    def _text(self, text: str) -> str:
        behind = self._marked(text)
        return "" if behind is None else self._begin(OPEN, behind)

    def _judge(self, verdict: Verdict, rest: str) -> str:
        if verdict is Verdict.DONE:
            self._out.end()
            self._stage, self.over = _Stage.DUE, not self._parallel
        elif verdict is Verdict.NONE:
            self._tries += 1
            self._out.say(self._lead)
            self._stage = _Stage.TEXT
        return rest
