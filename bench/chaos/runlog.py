"""What happened when, one JSON object a line: enough to understand a run afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType


class RunLog:
    """``t`` of every line is seconds since ``begin`` (the load's begin), negative before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._zero = time.monotonic()

    def begin(self) -> None:
        self._zero = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._zero

    def write(self, event: str, **facts: object) -> None:
        self._file.write(json.dumps({"t": round(self.now(), 4), "event": event, **facts}) + "\n")
        self._file.flush()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
