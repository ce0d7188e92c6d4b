"""A server-sent-event parser that forgives nothing, fed any number of bytes at a time."""

from __future__ import annotations

import json
from typing import Any


class StrictSSE:
    """Accepts only events of one ``data: `` line and a blank line; ``[DONE]``, if it comes, comes last."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: bytes | None = None
        self.events: list[Any] = []
        self.done = False

    def feed(self, raw: bytes) -> None:
        for byte in raw:
            if byte != 0x0A:
                assert byte != 0x0D, "carriage return"
                self._line.append(byte)
                continue
            line = bytes(self._line)
            self._line.clear()
            if line:
                assert self._data is None, "an event of two lines"
                assert line.startswith(b"data: "), line
                self._data = line[6:]
            else:
                self._finish_event()

    def _finish_event(self) -> None:
        assert self._data is not None, "a blank line without an event"
        assert not self.done, "an event after [DONE]"
        if self._data == b"[DONE]":
            self.done = True
        else:
            value = json.loads(self._data)
            assert isinstance(value, dict)
            self.events.append(value)
        self._data = None

    def close(self) -> None:
        assert not self._line and self._data is None, "the last event does not end with a blank line"


def parsed(raw: bytes) -> StrictSSE:
    """``raw`` fed one byte at a time."""
    parser = StrictSSE()
    for byte in raw:
        parser.feed(bytes([byte]))
    parser.close()
    return parser
