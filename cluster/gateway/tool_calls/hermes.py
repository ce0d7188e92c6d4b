"""Calls as Hermes, Qwen and many others write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Pure."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from moonpool.cluster.gateway.tool_calls.reading import MAX_TRIES, CallReader, Outbox, Said, Verdict, overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class _Stage(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER = auto()  # the closing mark is due; a model that forgets it is understood all the same


class HermesParser:
    """``parallel`` is false where one call is wanted: the answer is over with it."""

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        self._names = names
        self._parallel = parallel
        self._out = Outbox()
        self._reader = CallReader(names, self._out)
        self._stage = _Stage.TEXT
        self._held = ""
        self._tries = 0
        self.over = False

    def push(self, text: str) -> Said:
        self._feed(text)
        return self._out.take()

    def finish(self) -> Said:
        while not self.over and self._stage is _Stage.CALL:
            verdict, rest = self._reader.finish()
            self._feed(self._judge(verdict, rest))
        if not self.over:
            self._out.say(self._held)
        self._out.finish()
        return self._out.take()

    def _feed(self, text: str) -> None:
        while text and not self.over:
            if self._stage is _Stage.TEXT:
                text = self._text(text)
            elif self._stage is _Stage.CALL:
                text = self._judge(*self._reader.push(text))
            else:
                text = self._after(text)

    def _text(self, text: str) -> str:
        text, self._held = self._held + text, ""
        at = text.find(OPEN) if self._tries < MAX_TRIES else -1
        if at < 0:
            cut = len(text) - overlap(text, OPEN)
            self._held = text[cut:]
            self._out.say(text[:cut])
            return ""
        self._out.say(text[:at])
        self._stage, self._reader = _Stage.CALL, CallReader(self._names, self._out)
        return text[at + len(OPEN) :]

    def _judge(self, verdict: Verdict, rest: str) -> str:
        """What to read next."""
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
