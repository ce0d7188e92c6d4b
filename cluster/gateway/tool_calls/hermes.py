"""Calls as Hermes, Qwen and many others write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from moonpool.cluster.gateway.tool_calls.marked import MarkedParser
from moonpool.cluster.gateway.tool_calls.reading import CallReader, Verdict

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _Stage(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER = auto()  # the closing mark is due; a model that forgets it is understood all the same


class HermesParser(MarkedParser):
    """As ``MarkedParser``."""

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        super().__init__(OPEN, names, parallel=parallel)
        self._stage = _Stage.TEXT

    @property
    def _in_call(self) -> bool:
        return self._stage is _Stage.CALL

    def _step(self, text: str) -> str:
        if self._stage is _Stage.TEXT:
            return self._text(text)
        if self._stage is _Stage.CALL:
            return self._judge(*self._reader.push(text))
        return self._after(text)

    def _text(self, text: str) -> str:
        behind = self._marked(text)
        if behind is None:
            return ""
        self._stage, self._reader = _Stage.CALL, CallReader(self._names, self._out)
        return behind

    def _judge(self, verdict: Verdict, rest: str) -> str:
        if verdict is Verdict.DONE:
            self._out.end()
            self._stage, self.over = _Stage.AFTER, not self._parallel
        elif verdict is Verdict.NONE:
            self._tries += 1
            self._out.say(OPEN)
            self._stage = _Stage.TEXT
        return rest

    def _after(self, text: str) -> str:
        text, self._held = (self._held + text).lstrip(), ""
        if CLOSE.startswith(text):
            self._held = text
            if text != CLOSE:
                return ""
        self._stage, self._held = _Stage.TEXT, ""
        return text.removeprefix(CLOSE)
