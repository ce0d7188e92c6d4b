"""Calls as Llama 3 writes them: an answer that is ``{"name": ..., "parameters": {...}}``, or several with ``;`` between them.

``<|python_tag|>`` may stand before them, also after some text. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from moonpool.cluster.gateway.tool_calls.reading import BLANK_CHARS, MAX_TRIES, CallReader, Outbox, Said, Verdict, overlap

OPEN, BETWEEN = "<|python_tag|>", ";"


class _Stage(Enum):
    DUE = auto()  # a call, where a brace comes next: at the start of the answer, and after a call
    TEXT = auto()
    CALL = auto()


class Llama3Parser:
    """``parallel`` is false where one call is wanted: the answer is over with it."""

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        self._names = names
        self._parallel = parallel
        self._out = Outbox()
        self._reader = CallReader(names, self._out)
        self._stage = _Stage.DUE
        self._held = ""
        self._lead = ""  # what stands before the brace that may begin a call
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
            if self._stage is _Stage.DUE:
                text = self._due(text)
            elif self._stage is _Stage.TEXT:
                text = self._text(text)
            else:
                text = self._judge(*self._reader.push(text))

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
        text, self._held = self._held + text, ""
        at = text.find(OPEN) if self._tries < MAX_TRIES else -1
        if at < 0:
            cut = len(text) - overlap(text, OPEN)
            self._held = text[cut:]
            self._out.say(text[:cut])
            return ""
        self._out.say(text[:at])
        return self._begin(OPEN, text[at + len(OPEN) :])

    def _judge(self, verdict: Verdict, rest: str) -> str:
        """What to read next."""
        if verdict is Verdict.DONE:
            self._out.end()
            self._stage, self.over = _Stage.DUE, not self._parallel
        elif verdict is Verdict.NONE:
            self._tries += 1
            self._out.say(self._lead)
            self._stage = _Stage.TEXT
        return rest
