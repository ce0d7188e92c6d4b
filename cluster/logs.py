"""Structured logs: one line of JSON or logfmt, one file per process (``<state_dir>/logs/<member>.log``) or standard error.

Whatever concerns a request says so in its line: ``request`` and ``attempt`` are bound to the task that works for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

import structlog

from moonpool.core.config import ObserveConfig

OLDER = ".1"  # behind the name of the file before this one


def log_path(state_dir: Path, member: str) -> Path:
    return state_dir / "logs" / f"{member}.log"


class Stream:
    """A text stream whose troubles cost lines, and nobody's request: a full disk, a reader that is gone. Any thread."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.lost = 0  # writes that were not taken

    def write(self, text: str) -> int:
        with self._lock:
            try:
                return self._put(text)
            except (OSError, ValueError):  # ValueError: it is closed
                self.lost += 1
                return 0

    def _put(self, text: str) -> int:
        return self._file.write(text)

    def flush(self) -> None:
        with self._lock:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self.lost += 1


class BoundedFile(Stream):
    """Appends to ``path``; once ``limit`` bytes are in it, it becomes the older one and is begun anew."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        super().__init__(self._open())

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it meanwhile
        file = self._path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        self._size = os.fstat(file.fileno()).st_size
        return file

    def _put(self, text: str) -> int:
        if self._size >= self._limit:
            self._begin_anew()
        self._size += len(text)
        return super()._put(text)

    def _begin_anew(self) -> None:
        """Where no new file can be made, OSError: the next line tries again."""
        try:
            self._path.replace(self._path.with_name(self._path.name + OLDER))
        except OSError:  # it grows on, or is gone
            pass
        old, self._file = self._file, self._open()
        old.close()

    def close(self) -> None:
        with self._lock:
            try:
                self._file.close()
            except OSError:
                self.lost += 1


def open_log(state_dir: Path, member: str, observe: ObserveConfig | None = None) -> structlog.typing.FilteringBoundLogger:
    """Sends this process's structlog and standard logging there; returns a logger bound to ``member``."""
    observe = observe or ObserveConfig()
    file = BoundedFile(log_path(state_dir, member), observe.log_bytes) if observe.log_to == "file" else Stream(sys.stderr)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),  # prompts, keys
        _time_first,
    ]
    render = _renderer(observe)
    level = logging.getLevelNamesMapping()[observe.log_level.upper()]
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=file),  # type: ignore[arg-type]  # it writes and flushes
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("moonpool").setLevel(level)
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(member=member)
    return logger


def _time_first(
    _logger: structlog.typing.WrappedLogger, _method: str, line: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """So that `sort` puts the lines of several processes in order of time."""
    first = {name: line.pop(name) for name in ("timestamp", "level", "event") if name in line}
    return {**first, **line}


def _renderer(observe: ObserveConfig) -> structlog.typing.Processor:
    if observe.log_format == "json":
        return structlog.processors.JSONRenderer(sort_keys=False)
    logfmt = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
    return lambda logger, name, line: logfmt(logger, name, {key: _on_one_line(value) for key, value in line.items()})


def _on_one_line(value: object) -> object:
    """Logfmt escapes newlines only, and others end lines, too, or move a terminal's cursor."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in value)
