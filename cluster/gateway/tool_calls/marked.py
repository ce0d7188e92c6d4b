"""What parsers of calls that stand behind a mark share: the way of text through them, and the search for the mark. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from moonpool.cluster.gateway.tool_calls.reading import MAX_TRIES, CallReader, Outbox, Said, Verdict, overlap


class MarkedParser(ABC):
    """``parallel`` is false where one call is wanted: the answer is over with it."""

    def __init__(self, mark: str, names: Collection[str], *, parallel: bool) -> None:
        self._mark = mark
        self._names = names
        self._parallel = parallel
        self._out = Outbox()
        self._reader = CallReader(names, self._out)
        self._held = ""
        self._tries = 0
        self.over = False

    def push(self, text: str) -> Said:
        self._feed(text)
        return self._out.take()

    def finish(self) -> Said:
        while not self.over and self._in_call:
            verdict, rest = self._reader.finish()
            self._feed(self._judge(verdict, rest))
        if not self.over:
            self._out.say(self._unsaid())
        self._out.finish()
        return self._out.take()

    def _feed(self, text: str) -> None:
        while text and not self.over:
            text = self._step(text)

    @property
    @abstractmethod
    def _in_call(self) -> bool:
        """Whether ``_reader`` is at work."""

    @abstractmethod
    def _step(self, text: str) -> str:
        """Reads some of it; returns what to read next."""

    @abstractmethod
    def _judge(self, verdict: Verdict, rest: str) -> str:
        """After what ``_reader`` said: what to read next."""

    def _unsaid(self) -> str:
        """What is content after all where the text ends now."""
        return self._held

    def _marked(self, text: str) -> str | None:
        """What stands behind the mark, with all before it said; None: it is not there yet, and all is said or held."""
        text, self._held = self._held + text, ""
        at = text.find(self._mark) if self._tries < MAX_TRIES else -1
        if at < 0:
            cut = len(text) - overlap(text, self._mark)
            self._held = text[cut:]
            self._out.say(text[:cut])
            return None
        self._out.say(text[:at])
        return text[at + len(self._mark) :]
