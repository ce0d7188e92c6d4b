"""What a streamed answer says and when: server-sent events of the OpenAI completions and chat shapes, timed by the caller.

Pure: bytes and ``now`` in. A *text* is a piece of answer that is not empty. The role chunk of a chat stream, chunks
with empty content and comment lines (keep-alives) are not text, so they neither start nor space anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

_MAX_LINE = 1 << 20  # bytes of one event; a longer one is a broken server


@dataclass(slots=True)
class StreamReading:
    """Facts of one answer. Times are on the caller's clock, in seconds."""

    texts: list[float] = field(default_factory=list)  # when each piece of text came
    chunks: int = 0  # data events with a choice in them, with text or not
    first_chunk: float | None = None
    finished: float | None = None  # when the finish reason came
    finish_reason: str = ""
    done: bool = False  # [DONE] was seen
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""  # an error event, or bytes that are no event stream
    error_code: str = ""

    @property
    def first_text(self) -> float | None:
        """The first real text; a whole answer without any text counts from its end, which is the latest it can have been."""
        if self.texts:
            return self.texts[0]
        return self.finished if self.completion_tokens else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [b - a for a, b in zip(self.texts, self.texts[1:], strict=False)]


class StreamReader:
    """Feed it the body as it arrives; the facts so far are in ``reading``."""

    def __init__(self) -> None:
        self.reading = StreamReading()
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE:
            self._rest = b""
            self.reading.error = self.reading.error or f"an event is longer than {_MAX_LINE} bytes"
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.reading.done = True
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.reading.error = self.reading.error or f"an event is not a JSON object: {data[:60]!r}"
            return
        if value.get("error"):
            self.reading.error, self.reading.error_code = error_in(value)
        if isinstance(usage := value.get("usage"), dict):
            self._usage(usage)
        choices = value.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        found = self.reading
        found.chunks += 1
        if found.first_chunk is None:
            found.first_chunk = now
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        if text:
            found.texts.append(now)
        if choice.get("finish_reason"):
            found.finish_reason = str(choice["finish_reason"])
            found.finished = now

    def _usage(self, usage: dict[str, Any]) -> None:
        found = self.reading
        found.prompt_tokens = _count(usage.get("prompt_tokens"))
        found.completion_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        found.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def error_in(value: Any) -> tuple[str, str]:
    """(message, code) of an OpenAI-style error body; whatever text there is, where it has another shape."""
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))[:300], str(error.get("code") or error.get("type") or "")
    return str(error or value)[:300], ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
