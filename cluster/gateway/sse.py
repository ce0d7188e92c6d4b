"""Server-sent events, exactly: one JSON object per data line, a blank line after every event, ASCII only.

ASCII because U+2028, U+0085 and their kin end a line for some parsers; JSON escapes say the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx and its relatives: do not buffer
    "connection": "close",  # a stream that ends in an error must end its connection, and headers are sent before we know
}
DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, object]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def to_json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")
